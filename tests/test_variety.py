"""The variety of the simulated world: all that it is made for can be seen in its histories."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rlsched.commands import Abort, Flush, Generate, Sleep
from rlsched.facts import Fact, Scored, Segment
from rlsched.notes import Accept, Admit, Cancel, Drop, Publish, Reject
from rlsched.policy import Policy, areal_async
from rlsched.sim.world import World
from rlsched.slots.admit import Cap
from rlsched.slots.expire import AgeBound
from rlsched.slots.place import Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import RoundRobin
from rlsched.slots.select import InOrder
from rlsched.testing import Run, Trained, assert_clean, batches, run

from .account import account
from .test_world import busy, eager, hybrid


def of(history: Run, kind: type) -> list[Any]:
    """All events of one kind."""
    return [event for event in history.events if isinstance(event, kind)]


def sticky(history: Run) -> bool:
    """Siblings share an engine, and what was interrupted goes back to it."""
    home: dict[tuple[int, int], set[int]] = defaultdict(set)
    for event in of(history, Generate):
        for work in event.work:
            home[work.prompt, work.attempt].add(event.engine)
    return all(len(engines) == 1 for engines in home.values()) and len({e for s in home.values() for e in s}) > 1


def level(history: Run) -> bool:
    """No engine that gets work has then more than one rollout over the emptiest."""
    live: dict[int, set[int]] = {d.engine: set() for d in history.manifest.devices if d.engine is not None}
    sent: set[int] = set()
    for event in history.events:
        match event:
            case Generate():
                live[event.engine] |= {work.rollout for work in event.work}
                sent.add(event.engine)
            case Fact():
                if any(len(live[e]) > min(map(len, live.values())) + 1 for e in sent):
                    return False
                sent = set()
                if isinstance(event, Segment):
                    live[event.engine].discard(event.rollout)
            case _:
                pass
    return True


def waits_for_rewards(history: Run) -> bool:
    """Every group is accepted its reward's latency after its last rollout finished."""
    finished: dict[int, int] = {}
    late = []
    for event in history.events:
        match event:
            case Segment() if event.end != "abort":
                finished[event.rollout] = event.t
            case Scored():
                late.append(event.t - finished[event.rollout])
            case _:
                pass
    return bool(late) and {*late} == {4_000_000}


def requeues(history: Run) -> bool:
    """Every prompt that is dropped and not near the end returns once, with its attempt counted."""
    dropped = {e.group for e in of(history, Drop) if e.requeue}
    prompts = {e.group: (e.prompt, e.attempt) for e in of(history, Admit)}
    again = {(e.prompt, e.attempt) for e in of(history, Admit) if e.attempt}
    asked = {(prompt, attempt + 1) for prompt, attempt in (prompts[g] for g in dropped)}
    return bool(again) and again <= asked and len(asked) - len(again) <= history.manifest.shape.B


def most_live(history: Run) -> int:
    """Most groups that ran at once."""
    running = most = 0
    for event in history.events:
        running += isinstance(event, Admit) - isinstance(event, Accept | Reject | Cancel)
        most = max(most, running)
    return most


def ages(history: Run) -> list[int]:
    return [group.age for batch in batches(history.events) for group in batch.groups]


def sizes(group: Trained) -> list[int]:
    """Tokens of each sample, in no order."""
    return sorted(sum(tokens.values()) for tokens in group.samples.values())


def lived(history: Run) -> bool:
    """Requests lived through an update, and none was aborted for it."""
    return stood_on(history) and any(e.end == "install" for e in of(history, Segment))


def fresh(history: Run) -> bool:
    """All tokens stand on KV of their own version."""
    return all(e.kv_from == e.version for e in of(history, Segment))


def stood_on(history: Run, *fates: str) -> bool:
    """Beside cancellation, exactly these fates befell requests."""
    found = {e.fate for e in of(history, Abort)} - {"cancel"}
    return found == {*fates}


WORLDS: dict[str, tuple[Policy, Callable[[Run], bool]]] = {
    "round robin": (replace(eager(), route=RoundRobin()), sticky),
    "least loaded": (eager(), level),
    "three engines": (
        replace(eager(), place=Disaggregated(engines=3)),
        lambda h: {e.engine for e in of(h, Segment)} == {0, 1, 2},
    ),
    "k batches a version": (eager(), lambda h: [b.index for b in batches(h.events)] == [0, 1] * 4),
    "C over B": (eager(), lambda h: most_live(h) == 12),
    "C under B": (replace(eager(), admit=Cap(eta=1, C=3)), lambda h: most_live(h) == 3),
    "rewards take time": (eager(), waits_for_rewards),
    "groups are rejected": (eager(), lambda h: {e.why for e in of(h, Reject)} == {"filtered"}),
    "dropped on age": (
        replace(eager(), expire=AgeBound(bound=1)),
        lambda h: max(ages(h)) == 1 and bool(of(h, Drop)) and not any(e.attempt for e in of(h, Admit)),
    ),
    "requeued on age": (eager(), lambda h: max(ages(h)) == 1 and requeues(h)),
    "resume": (eager(), lambda h: stood_on(h, "resume") and any(w.have for g in of(h, Generate) for w in g.work)),
    "restart": (replace(eager(), publish=EveryVersion(fate="restart")), lambda h: stood_on(h, "restart")),
    "drain": (replace(eager(), publish=EveryVersion(fate="drain")), stood_on),
    "retract": (replace(eager(), publish=EveryVersion(fate="retract")), lambda h: lived(h) and fresh(h)),
    "keep": (replace(eager(), publish=EveryVersion(fate="keep")), lambda h: lived(h) and not fresh(h)),
    "sleep level 1": (hybrid(1), lambda h: {s.level for s in of(h, Sleep)} == {1}),
    "sleep level 2": (hybrid(2), lambda h: {s.level for s in of(h, Sleep)} == {2}),
    "unflushed": (replace(eager(), publish=EveryVersion(flush=False)), lambda h: not of(h, Flush)),
}
"""What a history must show, and the policy that makes it show it in the busy world."""


@pytest.mark.parametrize("name", WORLDS)
def test_the_world_shows(name: str) -> None:
    policy, shows = WORLDS[name]
    for seed in (0, 1):
        history = run(busy(), policy, seed)
        assert_clean(history)
        account(busy(), seed, history.events)
        assert shows(history)


@pytest.mark.parametrize(
    ("engine", "least"),
    [
        ({"kv_blocks": 14, "block_size": 4}, "preemptions"),
        ({"max_num_seqs": 1, "max_batch_tokens": 1}, "waiting"),
    ],
)
def test_a_tight_engine_only_takes_longer(engine: dict[str, int], least: str) -> None:
    """Preempted and queued requests make the same tokens as on an ample engine, later."""
    tight = replace(busy(), engine=replace(busy().engine, **engine))
    policy = replace(areal_async(), select=InOrder())
    histories = [run(world, policy, 3) for world in (busy(), tight)]
    for history in histories:
        assert_clean(history)
    made = [[[(g.admit.prompt, sizes(g)) for g in b.groups] for b in batches(h.events)] for h in histories]
    assert made[0] == made[1]
    assert histories[0].end.t < histories[1].end.t
    world = World(tight, policy, 3, lambda line: None)
    world.run()
    steps = [server._engine.counters for server in world.servers.values()]
    if least == "preemptions":
        assert sum(c.preemptions for c in steps) > 3
    else:
        # One request at a time, and one token a step: as many steps as tokens were computed.
        assert all(c.steps == c.prompt_tokens + c.decode_tokens for c in steps)


# ---- stalls


def stalled(history: Run, *why: str) -> None:
    """The run ended ill and says why, the checker calls it LIVE and nothing else, and the replay is exact."""
    assert not history.end.ok
    for part in why:
        assert part in history.end.why
    assert {*history.report.counts} == {"LIVE"}
    assert history.replay.divergence is None


def test_prompts_that_run_out_stall_the_run() -> None:
    world = replace(busy(), shape=replace(busy().shape, prompts=6))
    history = run(world, areal_async(), 0)
    stalled(history, "fewer than 2 groups are finished", "all 6 prompts were used")
    # What could be done was done before.
    assert len(of(history, Publish)) == (6 - len(of(history, Reject))) // 4
