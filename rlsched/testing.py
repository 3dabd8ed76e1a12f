"""The test kit: random worlds for a policy of your own, and what to demand of the histories.

    from hypothesis import given
    from hypothesis import strategies as st
    from rlsched.testing import assert_clean, policies, run, scenarios, seeds

    @given(scenarios(), policies(select=st.just(Freshest())), seeds())
    def test_freshest(scenario, policy, seed):
        assert_clean(run(scenario, policy, seed))

The strategies draw small worlds, a few hundred events long, that are rich in trouble: ties, queues,
preemption, interruption, rejected groups. ``batches`` says what was trained on, recounted from the
events alone. Needs the extra ``test``.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import Struct

from .checker import Checker, Report
from .commands import Abort, Generate, Part, Train
from .controller import Controller
from .facts import Down, End, Segment
from .history import Event
from .manifest import Manifest
from .notes import Accept, Admit, Cancel, Drop, Reject
from .policy import Policy
from .replay import Replay, compare
from .shape import Fate, Shape
from .sim.scenario import GB, Control, EngineCosts, MemoryCosts, Scenario, TrainerCosts, TransportCosts
from .sim.world import World
from .slots.admit import Barrier, Cap
from .slots.expire import AgeBound, Never
from .slots.place import Colocated, Disaggregated
from .slots.publish import EveryVersion
from .slots.route import LeastLoaded, RoundRobin
from .slots.select import FirstFinished, InOrder, OldestFinished
from .workload import Length, Workload

# ---- worlds to draw


@st.composite
def shapes(draw: st.DrawFn, /, **fixed: int) -> Shape:
    """A small shape. ``fixed`` fields aren't drawn."""
    drawn = {
        "b": draw(st.integers(1, 4)),
        "k": draw(st.integers(1, 3)),
        "samples": draw(st.integers(1, 3)),
        "steps": draw(st.integers(2, 5)),
        "engines": draw(st.integers(1, 3)),
        "budget": draw(st.integers(1, 48)),
    }
    return Shape(**{**drawn, **fixed})


@st.composite
def workloads(draw: st.DrawFn, fixed: bool | None = None, reject: float | None = None) -> Workload:
    """Lengths, reward latencies and filters. ``fixed``: whether all lengths are alike, so that ties abound."""
    if draw(st.booleans()) if fixed is None else fixed:
        prompt, output = Length(mean=draw(st.integers(1, 32))), Length(mean=draw(st.integers(1, 32)))
    else:
        shared = draw(st.sampled_from((0.5, 0.0, 1.0)))
        prompt = Length(kind="lognormal", mean=16.0, most=48)
        output = Length("lognormal", draw(st.integers(2, 32)), draw(st.sampled_from((0.6, 1.6))), shared)
    share = draw(st.sampled_from((0.0, 0.1, 0.4))) if reject is None else reject
    return Workload(prompt, output, reward_s=draw(st.sampled_from((0.0, 0.004, 0.08))), reject=share)


@st.composite
def scenarios(
    draw: st.DrawFn,
    shape: st.SearchStrategy[Shape] | None = None,
    workload: st.SearchStrategy[Workload] | None = None,
    even: bool | None = None,
) -> Scenario:
    """A world. ``even``: every duration is a multiple of a millisecond, so that much happens at one instant.

    KV memory, seats and token budgets are ample or so tight that requests queue and are preempted.
    """
    numbers = draw(shapes() if shape is None else shape)
    load = draw(workloads() if workload is None else workload)
    uneven = not draw(st.booleans()) if even is None else not even
    ms = 1e-3
    prompt, new = load.longest(numbers.budget)
    size = draw(st.sampled_from((16, 1, 4)))
    blocks = -(-(prompt + new) // size) + draw(st.sampled_from((4096, 0, 2)))
    seats = draw(st.sampled_from((256, 1, 3)))
    return Scenario(
        shape=numbers,
        workload=load,
        engine=EngineCosts(
            step_s=ms,
            seq_s=7e-6 if uneven else 0.0,
            kv_s=3e-7 if uneven else 0.0,
            prompt_s=2e-5 if uneven else 0.0,
            kv_blocks=blocks,
            block_size=size,
            max_num_seqs=seats,
            max_batch_tokens=draw(st.sampled_from((8192, seats, seats + 13))),
        ),
        trainer=TrainerCosts(
            old_logprob_s=draw(st.sampled_from((0.0, 2 * ms))),
            old_logprob_token_s=0.0,
            update_s=draw(st.sampled_from((0.0, 5 * ms, 40 * ms))),
            update_token_s=1e-5 if uneven else 0.0,
            optimizer_steps=draw(st.integers(1, 2)),
            parameters_gb=0.002,
            optimizer_gb=0.012,
        ),
        transport=TransportCosts(
            version_gb=2 * 2**20 / GB,
            ipc_gbps=2**20 / ms / GB,
            broadcast_bucket_s=draw(st.sampled_from((ms, 10 * ms))),
            broadcast_gbps=2**20 / ms / GB,
        ),
        memory=MemoryCosts(kv_gb=0.01, offload_gbps=1.0, sleep_s=ms, wake_weights_s=ms, wake_kv_s=ms),
        control=Control(
            latency_s=draw(st.sampled_from((ms, 0.0, 20 * ms))),
            submit_s=draw(st.sampled_from((0.0, ms))),
            abort_s=draw(st.sampled_from((0.0, ms))),
            pause_s=draw(st.sampled_from((0.0, 2 * ms))),
            flush_s=draw(st.sampled_from((0.0, ms))),
        ),
    )


@st.composite
def publishers(draw: st.DrawFn, within: bool = True) -> EveryVersion:
    """Publish slots: every fate of running requests, one bucket or several, engines together or in turn.

    ``within=False``: none that leaves requests inside an engine, which one that is put to sleep can't have.
    """
    outside: tuple[Fate, ...] = ("resume", "restart", "drain")
    fate = draw(st.sampled_from((*outside, "keep", "retract") if within else outside))
    return EveryVersion(
        draw(st.sampled_from(("broadcast", "ipc", "disk"))),
        draw(st.sampled_from((1024, 1))),
        fate,
        draw(st.booleans()) or fate == "retract",
        draw(st.booleans()),
    )


def selections() -> st.SearchStrategy[Any]:
    """Select slots."""
    finished = OldestFinished(), OldestFinished(shuffle=False), FirstFinished()
    return st.sampled_from((InOrder(), *finished, InOrder(whole=True)))


def colocations() -> st.SearchStrategy[Colocated]:
    """Place slots on which engines and trainer take turns: both sleep levels, trainer parts that leave or stay."""
    leaving: tuple[tuple[Part, ...], ...] = (("optimizer", "parameters"), ("optimizer",), ())
    turns = st.tuples(st.sampled_from((2, 1)), st.sampled_from(leaving))
    return turns.map(lambda t: Colocated(sleep=t[0], load=t[1][::-1], offload=t[1]))


@st.composite
def policies(draw: st.DrawFn, /, **slots: st.SearchStrategy[Any]) -> Policy:
    """A policy of rlsched's own slots. A slot that is given is drawn from there.

    Where the place slot promises quiet, requests don't stay inside at a publish, unless a given slot says so.
    """
    caps = st.builds(Cap, st.sampled_from((1, 0, 2, 3)), st.none() | st.integers(1, 12))
    apart = st.builds(Disaggregated, trainers=st.integers(1, 2))
    defaults: dict[str, st.SearchStrategy[Any]] = {
        "admit": _mostly(caps, st.just(Barrier())),
        "select": selections(),
        "expire": st.just(Never()) | st.builds(AgeBound, st.integers(0, 2), st.booleans()),
        "place": _mostly(apart, colocations()),
        "route": st.sampled_from((RoundRobin(), LeastLoaded())),
    }
    drawn = {name: draw(slots.get(name, default)) for name, default in defaults.items()}
    within = not drawn["place"].promises(Shape()).quiet
    return Policy("drawn", publish=draw(slots.get("publish", publishers(within))), **drawn)


def _mostly(often: st.SearchStrategy[Any], seldom: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Three times out of four ``often``."""
    return st.integers(0, 3).flatmap(lambda n: seldom if n == 3 else often)


def seeds() -> st.SearchStrategy[int]:
    """Seeds of a run."""
    return st.integers(0, 2**32 - 1)


# ---- what comes of them


class Run(Struct, frozen=True):
    """A simulated run, and what was found about it."""

    manifest: Manifest
    lines: list[bytes]
    """The history after the manifest, as it would be written."""
    events: list[Event]
    """The same, as it would be read."""
    end: End
    report: Report
    replay: Replay


def run(scenario: Scenario, policy: Policy, seed: int = 0) -> Run:
    """Simulate ``policy``, check the history, and replay it on a fresh controller.

    Raises PolicyError when a slot raises or answers what can't be done.
    """
    encode, decode = msgspec.json.Encoder().encode, msgspec.json.Decoder(Event).decode
    lines: list[bytes] = []
    world = World(scenario, policy, seed, lambda line: lines.append(encode(line)))
    end = world.run()
    events: list[Event] = [decode(line) for line in lines]
    checker = Checker(world.manifest)
    for number, event in enumerate(events, start=2):
        checker.feed(number, event)
    replayed = compare(Controller(policy, scenario.shape, seed), events)
    return Run(world.manifest, lines, events, end, checker.close(False), replayed)


def assert_clean(run: Run) -> None:
    """The run ended well, no invariant was violated, and the replay is exact over the whole history."""
    assert run.end.ok, run.end.why
    assert run.report.ok, "\n".join(map(str, run.report.violations))
    assert run.replay.divergence is None, run.replay.divergence
    read = run.replay.facts + run.replay.answers
    assert read == run.report.events == len(run.events), f"{read} of {len(run.events)} events were replayed"


class Tally:
    """Counts what the examples of a property did, lest it holds because nothing was put to the test."""

    def __init__(self) -> None:
        self.examples = 0
        self.counts: Counter[str] = Counter()

    def add(self, **did: bool) -> None:
        """Count an example that did these things, or did not."""
        self.examples += 1
        self.counts.update(what for what, true in did.items() if true)

    def demand(self, **least: float) -> None:
        """Each of these things was done by at least that share of the examples."""
        shares = {what: self.counts[what] / max(1, self.examples) for what in least}
        short = {what: share for what, share in shares.items() if share < least[what]}
        assert not short, f"of {self.examples} examples too few put it to the test: {short}"


class Trained(Struct, frozen=True):
    """A group of a batch."""

    admit: Admit
    samples: dict[int, dict[int, int]]
    """Its trained rollouts: the tokens of each, by the version that made them."""
    consuming: int
    """Versions trained when the training on it began."""

    @property
    def age(self) -> int:
        """``consuming`` minus the version of the oldest token."""
        return self.consuming - min(version for tokens in self.samples.values() for version in tokens)

    @property
    def admission_age(self) -> int:
        """``consuming`` minus the version published at admission."""
        return self.consuming - self.admit.version


class Batch(Struct, frozen=True):
    """What one ``Train`` command took, and what it took it from."""

    version: int
    """The version that it made, or helped to make."""
    index: int
    groups: list[Trained]
    """In the order of the command."""
    buffer: list[int]
    """Groups that were accepted and not yet consumed, those of the batch included, in order of acceptance."""


def batches(events: Iterable[Event]) -> Iterator[Batch]:
    """What was trained on, recounted from a history's events."""
    admits: dict[int, Admit] = {}
    buffer: dict[int, None] = {}
    tokens: dict[int, Counter[int]] = {}
    told: set[tuple[int, int, int]] = set()
    sent: dict[int, dict[int, Counter[int]]] = {}
    restarting: set[int] = set()
    for event in events:
        match event:
            case Admit():
                admits[event.group] = event
            case Accept():
                buffer[event.group] = None
            case Reject() | Drop() | Cancel():
                buffer.pop(event.group, None)
            case Abort(fate="restart"):
                restarting |= {*event.rollouts}
            case Generate():
                had = {work.rollout: Counter(tokens.get(work.rollout, Counter())) for work in event.work}
                sent.setdefault(event.engine, {}).update(had)
            case Down() if event.engine is not None:
                tokens |= sent.pop(event.engine, {})  # those that were inside have what they were sent with
            case Segment():
                words = event.by, event.rollout, event.version
                if event.rollout not in sent.get(event.engine, {}) or (event.end == "install" and words in told):
                    continue  # it was told before
                if event.end == "install":
                    told.add(words)
                else:
                    del sent[event.engine][event.rollout]
                tokens.setdefault(event.rollout, Counter())[event.version] += event.n
                if event.end == "abort" and event.rollout in restarting:
                    tokens[event.rollout].clear()
                if event.end != "install":
                    restarting.discard(event.rollout)
            case Train():
                taken = [_trained(admits[g], event, tokens) for g in event.groups]
                yield Batch(event.version, event.index, taken, [*buffer])
                for g in event.groups:
                    buffer.pop(g, None)
            case _:
                pass


def _trained(admit: Admit, train: Train, tokens: dict[int, Counter[int]]) -> Trained:
    own = [r for r in train.rollouts if admit.first <= r < admit.first + admit.launch_n]
    return Trained(admit, {r: dict(+tokens[r]) for r in own}, train.version - 1)


__all__ = [
    "Batch",
    "Run",
    "Tally",
    "Trained",
    "assert_clean",
    "batches",
    "colocations",
    "policies",
    "publishers",
    "run",
    "scenarios",
    "seeds",
    "selections",
    "shapes",
    "workloads",
]
