"""The controller, driven by hand: what it commands, in which order, and what it makes of late and broken facts."""

from collections.abc import Callable
from typing import Any

import pytest

from rlsched.commands import (
    Abort,
    Flush,
    Generate,
    Load,
    Offload,
    Pause,
    Resume,
    Sleep,
    Stop,
    Timer,
    Train,
    Transfer,
    Wake,
    Work,
)
from rlsched.controller import Controller
from rlsched.decisions import Batch, Hold, Install, Move, Start, Verdict, Wait
from rlsched.errors import PolicyError
from rlsched.facts import Begin, Done, Down, End, Installed, Phase, Scored, Segment, Trained, Updating
from rlsched.ledger import Ledger
from rlsched.notes import Accept, Admit, Cancel, Drop, Go, Publish, Reject
from rlsched.notes import Wait as Waits
from rlsched.policy import SLOTS, Policy, areal_async, replace, verl_hybrid
from rlsched.shape import Promises, Shape
from rlsched.slot import Slot
from rlsched.slots.admit import Cap, starts
from rlsched.slots.expire import AgeBound
from rlsched.slots.place import Colocated, Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import LeastLoaded
from rlsched.slots.select import FirstFinished, InOrder

Hands = Callable[..., Any]

AHEAD = replace(areal_async(), admit=Cap(eta=1, C=2), route=LeastLoaded())
"""The asynchronous preset, one version ahead, with two groups running."""


def kinds(out: list[Any]) -> list[str]:
    return [type(line).__name__ for line in out]


def one(out: list[Any], kind: type) -> Any:
    (found,) = [line for line in out if isinstance(line, kind)]
    return found


def every(out: list[Any], kind: type) -> list[Any]:
    return [line for line in out if isinstance(line, kind)]


def call(slot: str, decide: Callable[..., Any], base: type = Slot) -> dict[str, Any]:
    """A slot that decides as told, for ``replace``."""
    return {slot: type("Odd", (base,), {"decide": lambda self, state, *args: decide(*args)}, frozen=True)()}


# ---- before the run begins


def test_nothing_is_commanded_before_the_world_is_set_up(hand: Hands) -> None:
    drive = hand(areal_async())
    assert drive.tell(Installed, 0, 0, 0, 10) == []
    assert kinds(drive.tell(Begin)) == ["Wait", "Admit", "Generate"]


def test_the_first_commands_are_told_to_the_last_field(hand: Hands) -> None:
    drive = hand(areal_async(), b=2, samples=2)
    assert drive.begin() == [
        Waits("trainer", "fewer than 2 groups are finished"),
        Admit(0, 0, 0, 2, 2, 0),
        Admit(1, 1, 0, 2, 2, 2),
        Generate(1, 0, [Work(0, 0, 0), Work(1, 0, 1)]),
        Generate(2, 0, [Work(2, 1, 0), Work(3, 1, 1)]),
    ]


# ---- the fixed order


class Spy:
    """A slot that notes when it is asked."""

    def __init__(self, name: str, slot: Any, log: list[str]) -> None:
        self.name, self.slot, self.log = name, slot, log

    def start(self, shape: Shape, seed: int) -> Any:
        return self.slot.start(shape, seed)

    def observe(self, state: Any, event: Any, ledger: Ledger) -> Any:
        return self.slot.observe(state, event, ledger)

    def promises(self, shape: Shape) -> Promises:
        return self.slot.promises(shape)

    def layout(self, shape: Shape) -> Any:
        return self.slot.layout(shape)

    def decide(self, state: Any, *args: Any) -> Any:
        self.log.append(self.name)
        return self.slot.decide(state, *args)


ORDER = ("expire", "publish", "select", "place", "admit", "route")


@pytest.mark.parametrize("policy", [verl_hybrid(), areal_async(), AHEAD], ids=lambda p: p.name)
def test_slots_are_asked_in_one_fixed_order(policy: Policy, hand: Hands) -> None:
    """In every pass, and a pass that changed something is followed by another."""
    log: list[str] = []
    drive = hand(Policy(policy.name, **{n: Spy(n, s, log) for n, s in policy.slots()}))  # type: ignore[arg-type]
    drive.begin()
    seen: list[tuple[str, ...]] = []

    def passes() -> list[list[str]]:
        """Split where the order begins anew."""
        found: list[list[str]] = [[]]
        for name in log:
            if found[-1] and ORDER.index(name) < ORDER.index(found[-1][-1]):
                found.append([])
            found[-1].append(name)
        log.clear()
        return found

    def drop_repeats(names: list[str]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(names))

    first = passes()
    assert drop_repeats(first[0])[0] == "expire" and drop_repeats(first[0])[-2:] == ("admit", "route")
    for rollout in sorted(drive.home):
        drive.finish(rollout)
        seen += map(drop_repeats, passes())
    assert any({"select", "place", "admit"} <= {*names} for names in seen), "the batch's pass asks all of them"
    assert all(list(names) == sorted(names, key=ORDER.index) for names in seen)


def test_a_slot_that_keeps_state_folds_every_fact_once(hand: Hands) -> None:
    class Counting(FirstFinished, frozen=True):
        def start(self, shape: Shape, seed: int) -> list[str]:
            return [f"{shape.b}/{seed}"]

        def observe(self, state: list[str], event: Any, ledger: Ledger) -> list[str]:
            assert ledger.now == event.t, "the ledger has the fact in it already"
            return [*state, type(event).__name__]

        def decide(self, state: list[str], ledger: Ledger) -> Batch | Wait:
            told.append(state)
            return super().decide(None, ledger)

    told: list[list[str]] = []
    drive = hand(replace(areal_async(), select=Counting()))
    drive.begin()
    drive.finish(0)
    assert told[-1] == ["1/0", "Installed", "Begin", "Segment", "Done", "Scored"]


# ---- the asynchronous preset, from update to update


def test_an_update_interrupts_pauses_transfers_flushes_publishes_and_resumes(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2)
    assert kinds(drive.begin()) == ["Wait", "Admit", "Admit", "Generate", "Generate"]
    out = drive.finish(0)
    assert kinds(out) == ["Accept", "Go", "Train"], "no room for a third group: one is unpublished, one running"
    train = one(out, Train)
    assert train == Train(3, 1, 0, True, [0], [0])
    assert drive.tell(Trained, train.id, 1, 4) == []

    out = drive.done(train)
    assert out == [Abort(4, 1, [1], "resume")]
    abort = one(out, Abort)
    out = drive.aborted(abort, 2)
    assert out == [Pause(5, 0), Pause(6, 1)]
    assert drive.done(out[0]) == []
    out = drive.done(out[1])
    assert out == [Transfer(7, 1, [0, 1], "broadcast", 1024 * 2**20)]
    out = drive.install(out[0])
    assert out == [Flush(8, 0), Flush(9, 1)]
    out = drive.done(*out)
    assert out == [
        *(Publish(1, [0, 1]), Resume(10, 0), Resume(11, 1), Admit(2, 2, 1, 1, 1, 2)),
        *(Generate(12, 0, [Work(1, 1, 0, 0, 2)]), Generate(13, 1, [Work(2, 2)])),
    ]
    resumed = drive.home[1]
    assert resumed.work == [Work(1, 1, 0, 0, 2)], "prompt and tokens so far are sent again"
    drive.done(*every(out, Resume))
    assert not drive.ledger.tracks and drive.ledger.update is None


def test_tokens_of_both_versions_are_told_apart_after_an_update(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2)
    drive.begin()
    update(drive, drive.finish(0))
    drive.tokens(1, 3)
    assert [(s.version, s.n) for s in drive.ledger.rollouts[1].spans] == [(0, 2), (1, 3)]
    assert drive.ledger.rollouts[1].interrupts == 1


def update(drive: Any, out: list[Any]) -> list[Any]:
    """Answer everything from a Train to the end of its update; all that was said."""
    said = [*out]
    queue = [line for line in out if not isinstance(line, Generate)]
    while queue:
        line = queue.pop(0)
        match line:
            case Abort():
                more = drive.aborted(line)
            case Transfer():
                more = drive.install(line)
            case Train() | Pause() | Resume() | Flush() | Sleep() | Wake() | Load() | Offload():
                more = drive.done(line)
            case _:
                continue
        said += more
        queue += [m for m in more if not isinstance(m, Generate)]
    return said


def test_restart_throws_the_tokens_away(hand: Hands) -> None:
    drive = hand(replace(AHEAD, publish=EveryVersion(fate="restart")), engines=2)
    drive.begin()
    out = update(drive, drive.finish(0))
    assert one(out, Abort).fate == "restart"
    assert drive.home[1].work == [Work(1, 1)]
    assert drive.ledger.rollouts[1].spans == []


def test_drain_waits_for_what_runs_and_sends_nothing_new_meanwhile(hand: Hands) -> None:
    drive = hand(replace(AHEAD, publish=EveryVersion(fate="drain", flush=False)), engines=2)
    drive.begin()
    assert drive.done(one(drive.finish(0), Train)) == []
    out = drive.tokens(1)
    assert kinds(out) == ["Pause", "Pause"], "the engines are empty"
    out = update(drive, out)
    assert kinds(out)[:5] == ["Pause", "Pause", "Transfer", "Publish", "Resume"]
    assert not every(out, Abort) and not every(out, Flush)


@pytest.mark.parametrize("fate", ["retract", "keep"])
def test_requests_live_through_an_update_inside_their_engine(hand: Hands, fate: Any) -> None:
    drive = hand(replace(AHEAD, publish=EveryVersion(fate=fate)), engines=2)
    drive.begin()
    out = drive.done(one(drive.finish(0), Train))
    assert kinds(out) == ["Pause", "Pause"], "nothing is aborted, nor waited for"
    assert drive.tokens(1, 3, "install") == []
    assert drive.done(out[0]) == []
    (transfer,) = drive.done(out[1])
    out = drive.install(transfer)
    if fate == "retract":
        assert [(f.engine, f.recompute) for f in every(out, Flush)] == [(0, True), (1, True)]
        out = drive.done(*out)
    assert kinds(out) == ["Publish", "Resume", "Resume", "Admit", "Generate"], "only the new one is sent"
    assert out[-1].work == [Work(2, 2)]
    drive.tokens(1, 2)
    assert [(s.version, s.n) for s in drive.ledger.rollouts[1].spans] == [(0, 3), (1, 2)]
    assert drive.ledger.rollouts[1].interrupts == 0


def test_what_is_told_again_of_an_install_is_ignored(hand: Hands) -> None:
    drive = hand(replace(AHEAD, publish=EveryVersion(fate="keep")), engines=2)
    drive.begin()
    drive.done(one(drive.finish(0), Train))
    for _ in range(2):
        drive.tokens(1, 3, "install")
    assert drive.ledger.rollouts[1].tokens == 3
    assert drive.ledger.counters.ignored == 1


def test_only_engines_that_lack_a_version_are_paused_with_requests_inside(hand: Hands) -> None:
    class Again(EveryVersion, frozen=True):
        def decide(self, state: None, ledger: Ledger) -> Install | None:
            update = super().decide(state, ledger)
            return update and replace(update, engines=[0, 1])

    drive = hand(replace(AHEAD, publish=Again(fate="keep")), engines=2)
    drive.begin()
    drive.ledger.engines[1].installed = -1
    with pytest.raises(PolicyError, match=r"fate keep on engines \[0\], which hold that version already"):
        drive.finish(0)


def test_nothing_is_in_flight_at_a_publish_without_running_ahead(hand: Hands) -> None:
    """η = 0 with static B: the abort and resume of an update have nothing to do."""
    drive = hand(areal_async(), b=2, engines=2)
    drive.begin()
    drive.finish(0)
    out = update(drive, drive.finish(1))
    assert not every(out, Abort)
    assert kinds(out)[:2] == ["Accept", "Go"] and one(out, Publish) == Publish(1, [0, 1])


def test_batches_of_one_version_share_its_number_and_only_the_last_is_published(hand: Hands) -> None:
    drive = hand(replace(areal_async(), select=InOrder()), k=2)
    drive.begin()
    first = one(drive.finish(0), Train)
    assert first == Train(first.id, 1, 0, False, [0], [0])
    assert drive.finish(1)[0] == Accept(1), "the trainer is busy"
    out = drive.done(first)
    second = one(out, Train)
    assert second == Train(second.id, 1, 1, True, [1], [1])
    assert drive.ledger.unpublished == 2 and drive.ledger.x == 0
    out = update(drive, [second])
    assert every(out, Publish) == [Publish(1, [0])]
    assert drive.ledger.unpublished == 0 and drive.ledger.x == drive.ledger.v == 1


# ---- the hybrid preset


def test_hybrid_sleeps_loads_trains_offloads_wakes_transfers_and_wakes_the_cache(hand: Hands) -> None:
    drive = hand(verl_hybrid(), engines=2, b=2)
    drive.begin()
    drive.finish(0)
    out = drive.finish(1)
    assert out == [Accept(1), Go("trainer"), Sleep(3, 0, 2), Sleep(4, 1, 2)]
    assert drive.done(out[2]) == [], "both must be asleep"
    (out,) = drive.done(out[3])
    assert out == Load(5, ["parameters", "optimizer"])
    (out,) = drive.done(out)
    assert out == Train(6, 1, 0, True, [0, 1], [0, 1])
    assert drive.ledger.holders == {0: "trainer", 1: "trainer"}
    (out,) = drive.done(out)
    assert out == Offload(7, ["optimizer"])
    out = drive.done(out)
    assert out == [Wake(8, 0, ["weights"]), Wake(9, 1, ["weights"])]
    (out,) = drive.done(*out)
    assert out == Transfer(10, 1, [0, 1], "ipc", 2048 * 2**20)
    out = drive.install(out)
    assert out[:2] == [Publish(1, [0, 1]), Offload(11, ["parameters"])]
    assert not every(out, Generate), "the KV cache is not there yet"
    out = drive.done(out[1])
    assert every(out, Wake) == [Wake(12, 0, ["kv"]), Wake(13, 1, ["kv"])]
    out = drive.done(*every(out, Wake))
    assert sum(len(g.work) for g in every(out, Generate)) == 2
    assert drive.ledger.holders == {0: "engine", 1: "engine"}
    assert not every(out, Pause) and not every(out, Resume)


def test_hybrid_waits_until_what_runs_has_come_back(hand: Hands) -> None:
    """A rejected group's siblings still run when the batch is whole."""
    policy = replace(verl_hybrid(), **call("admit", lambda ledger: starts(ledger, 1 - ledger.counters.admitted, 1)))
    drive = hand(policy)
    drive.begin()
    out = drive.finish(0)
    assert kinds(out) == ["Accept", "Abort", "Go"]
    assert kinds(drive.aborted(one(out, Abort))) == ["Sleep"]


def test_what_is_kept_on_the_device_is_neither_loaded_nor_offloaded(hand: Hands) -> None:
    drive = hand(replace(verl_hybrid(), place=Colocated(sleep=1, load=(), offload=())))
    drive.begin()
    out = update(drive, drive.finish(0))
    assert kinds(out)[:7] == ["Accept", "Go", "Sleep", "Train", "Wake", "Transfer", "Publish"]
    assert every(out, Sleep)[0].level == 1
    assert not every(out, Load) and not every(out, Offload)


def test_hybrid_trains_its_second_batch_without_waking_in_between(hand: Hands) -> None:
    drive = hand(verl_hybrid(), k=2)
    drive.begin()
    drive.finish(0)
    out = update(drive, drive.finish(1))
    assert [t.index for t in every(out, Train)] == [0, 1]
    first, second = (i for i, line in enumerate(out) if isinstance(line, Train))
    assert not every(out[first:second], Wake) and not every(out[first:second], Sleep)


# ---- groups


def test_a_filtered_group_is_rejected_and_replaced(hand: Hands) -> None:
    drive = hand(areal_async(), samples=2)
    drive.begin()
    out = drive.finish(0, keep=False)
    assert out[:2] == [Reject(0, "filtered"), Abort(2, 0, [1], "cancel")]
    assert one(out, Admit) == Admit(1, 1, 0, 2, 2, 2)
    assert drive.ledger.counters.rejected == 1
    drive.aborted(one(out, Abort))
    assert {*drive.ledger.rollouts} == {2, 3} and {*drive.ledger.groups} == {1}


def test_a_failed_rollout_rejects_its_group(hand: Hands) -> None:
    drive = hand(areal_async())
    drive.begin()
    out = drive.tokens(0, 0, "error")
    assert out[0] == Reject(0, "rollout 0 failed") and one(out, Admit).group == 1


def test_surplus_samples_are_called_back_when_the_group_is_whole(hand: Hands) -> None:
    two_more = call("admit", lambda ledger: starts(ledger, 1 - ledger.counters.admitted, 2))
    drive = hand(replace(areal_async(), **two_more))
    drive.begin()
    out = drive.finish(1)
    assert one(out, Abort) == Abort(2, 0, [0, 2], "cancel")
    assert one(out, Train).rollouts == [1]


def test_an_old_group_is_dropped_and_its_prompt_tried_again(hand: Hands) -> None:
    policy = replace(AHEAD, expire=AgeBound(bound=0, requeue=True), publish=EveryVersion(fate="drain"))
    drive = hand(policy, engines=2)
    drive.begin()
    out = drive.finish(0)
    drive.finish(1)
    out = update(drive, [one(out, Train)])
    assert one(out, Drop) == Drop(1, "age 1", True)
    again = next(a for a in every(out, Admit) if a.prompt == 1)
    assert again.attempt == 1 and again.group == 2, "another attempt is another ordinal"
    assert drive.ledger.counters.dropped == 1 and drive.ledger.accepted == 1


def test_a_running_group_may_be_cancelled(hand: Hands) -> None:
    drive = hand(replace(areal_async(), **call("expire", cancel_first)))
    drive.begin()
    out = drive.tell(Phase, 0, "nothing", 0)
    assert out == []
    drive = hand(replace(areal_async(), admit=Cap(eta=1, C=2), **call("expire", cancel_first)))
    drive.begin()
    out = drive.finish(0)
    assert every(out, Cancel) == [Cancel(1, "too long")]
    assert one(out, Abort).fate == "cancel"
    assert drive.ledger.counters.cancelled == 1


def cancel_first(ledger: Ledger, trigger: str) -> list[Verdict]:
    """Give the first running group up once another one is accepted."""
    if trigger != "train" or not ledger.buffer or not ledger.running:
        return []
    return [Verdict(next(iter(ledger.running)), "drop", "too long")]


def test_what_is_forgotten_leaves_nothing_behind(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2, steps=99)
    drive.begin()
    for step in range(12):
        update(drive, drive.finish(step))
    ledger = drive.ledger
    assert len(ledger.groups) <= 3 and len(ledger.rollouts) <= 3
    assert {*ledger.pending} <= {*ledger.open} and len(ledger.open) <= 2
    assert not ledger.recalled and not ledger.taken


# ---- the end


def test_the_run_ends_when_its_last_version_is_out(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2, steps=1)
    drive.begin()
    out = update(drive, drive.finish(0))
    assert Publish(1, [0, 1]) in out
    assert every(out, Cancel) == [Cancel(1, "the run ends")]
    stop = one(out, Stop)
    assert stop.why == "" and out[-1] == stop
    assert drive.tell(End, stop.id) == []


def test_a_command_that_failed_stops_the_run_with_its_reason(hand: Hands) -> None:
    drive = hand(areal_async())
    drive.begin()
    train = one(drive.finish(0), Train)
    assert drive.tell(Done, train.id, False, "out of memory") == [Stop(train.id + 1, "out of memory")]
    assert drive.tell(Phase, 0, "more", 0) == [] and drive.tell(Trained, train.id, 1, 4) == []
    drive = hand(areal_async())
    drive.begin()
    assert one(drive.tell(Done, 1, False), Stop).why == "command 1 failed"


def test_a_torn_update_is_not_published(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2)
    drive.begin()
    out = drive.finish(0)
    while not every(out, Transfer):
        out = update_once(drive, out)
    transfer = one(out, Transfer)
    drive.tell(Updating, transfer.id, 0, 1)
    drive.tell(Updating, transfer.id, 1, 1)
    drive.tell(Installed, transfer.id, 0, 1, 10)
    drive.tell(Installed, transfer.id, 1, 1, 5, False)
    out = drive.done(transfer)
    assert drive.ledger.engines[1].installed == -1
    while out and not every(out, Transfer):
        assert not every(out, Publish), "engine 1 does not hold it"
        assert all(g.engine == 0 for g in every(out, Generate)), "nothing may run on torn weights"
        out = update_once(drive, out)
    retried = one(out, Transfer)
    assert 1 in retried.engines and retried.version == 1
    assert one(update(drive, [retried]), Publish) == Publish(1, [0, 1])


def update_once(drive: Any, out: list[Any]) -> list[Any]:
    """Answer the commands of ``out``, but no Generate; what follows."""
    more: list[Any] = []
    for line in out:
        match line:
            case Abort():
                more += drive.aborted(line)
            case Train() | Pause() | Resume() | Flush():
                more += drive.done(line)
    return more


# ---- engines that go down


def test_what_a_dead_engine_had_starts_again_elsewhere_from_the_tokens_it_was_sent_with(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2)
    drive.begin()
    drive.tokens(1, 3, "install")
    assert drive.ledger.rollouts[1].tokens == 3
    assert (lost := drive.home[1]).engine == 1
    out = drive.tell(Down, 1, "it died")
    assert kinds(out) == ["Generate"] and out[0].engine == 0
    assert out[0].work == [Work(1, 1, 0, 0, 0)]
    assert lost.id not in drive.ledger.open, "its command is answered by the Down"
    assert drive.ledger.rollouts[1].cause == "retry"
    assert drive.ledger.serving() == [0]


def test_an_update_goes_to_the_engines_that_are_up(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2)
    drive.begin()
    drive.tell(Down, 1, "it died")
    out = update(drive, drive.finish(0))
    assert one(out, Transfer).engines == [0] and one(out, Publish).engines == [0]
    assert [p.engine for p in every(out, Pause)] == [0]


@pytest.mark.parametrize("stage", ["Abort", "Pause", "Flush", "Resume"])
def test_an_engine_that_goes_down_amid_an_update_does_not_hold_it_up(stage: str, hand: Hands) -> None:
    """Its commands are answered by the Down, and nobody says that it holds the version."""
    drive = hand(AHEAD, engines=2)
    drive.begin()
    out = drive.finish(0)
    said: list[Any] = []
    while stage not in kinds(out):
        said += out
        out = [more for line in out for more in answer(drive, line)]
    gone = [c.id for c in out if getattr(c, "engine", None) == 1]
    assert gone
    more = drive.tell(Down, 1, "it died")
    rest = [line for line in out if getattr(line, "engine", 0) != 1]
    said += update(drive, [*rest, *more])
    published = every(said, Publish)
    assert len(published) == 1 and published[0].version == 1
    assert published[0].engines == ([0, 1] if stage == "Resume" else [0])
    assert not {*gone} & {*drive.ledger.open}
    assert drive.home[1].engine == 0


def answer(drive: Any, line: Any) -> list[Any]:
    match line:
        case Abort():
            return list(drive.aborted(line))
        case Transfer():
            return list(drive.install(line))
        case Train() | Pause() | Flush():
            return list(drive.done(line))
    return []


def test_a_down_twice_or_of_a_stranger_is_harmless(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2)
    drive.begin()
    drive.tell(Down, 1, "it died")
    assert drive.tell(Down, 1, "it died") == []
    assert drive.tell(Down, 9, "who") == []


def test_a_late_segment_of_a_dead_engine_is_ignored(hand: Hands) -> None:
    drive = hand(AHEAD, engines=2)
    drive.begin()
    lost = drive.home[1]
    drive.tell(Down, 1, "it died")
    before = drive.ledger.counters.ignored
    assert drive.tell(Segment, lost.id, 1, 1, 0, 5, "stop", 0) == []
    assert drive.tell(Done, lost.id) == []
    assert drive.ledger.counters.ignored == before + 2
    assert drive.ledger.rollouts[1].tokens == 0


# ---- late and repeated facts


def test_late_and_repeated_facts_are_counted_and_change_nothing(hand: Hands) -> None:
    drive = hand(areal_async(), samples=2)
    drive.begin()
    home = drive.home[0]
    drive.tokens(0)
    for kind, fields in (
        (Segment, (home.id, 0, 0, 0, 4, "stop", 0)),
        (Segment, (home.id, 1, 7, 0, 4, "stop", 0)),
        (Segment, (home.id, 99, 0, 0, 4, "stop", 0)),
        (Scored, (1,)),
        (Scored, (99,)),
        (Done, (99,)),
    ):
        before = drive.ledger.counters.ignored
        assert drive.tell(kind, *fields) == []
        assert drive.ledger.counters.ignored == before + 1, kind
    assert drive.tell(Scored, 0) == []
    before = drive.ledger.counters.ignored
    assert drive.tell(Scored, 0, 5.0) == []
    assert drive.ledger.counters.ignored == before + 1, "a score that comes twice"
    assert drive.ledger.rollouts[0].tokens == 4
    assert kinds(drive.finish(1)) == ["Accept", "Go", "Train"]


# ---- waiting


def test_a_wait_is_noted_once_and_its_end_too(hand: Hands) -> None:
    drive = hand(areal_async(), b=2)
    assert every(drive.begin(), Waits) == [Waits("trainer", "fewer than 2 groups are finished")]
    assert every(drive.finish(0), Waits) == []
    assert kinds(drive.finish(1)) == ["Accept", "Go", "Train"]
    assert drive.ledger.waited == {"trainer": 6}, "two segments, answers and scores, a nanosecond each"


def test_a_wait_with_a_time_asks_for_one_timer(hand: Hands) -> None:
    policy = replace(areal_async(), **call("select", lambda ledger: Wait("not yet", 50)))
    drive = hand(policy)
    assert one(drive.begin(), Timer).at == 50
    assert not every(drive.tokens(0), Timer)
    timer = next(c for c in drive.ledger.open.values() if isinstance(c, Timer))
    drive.now = 49
    assert drive.done(timer) == [], "its time has come: no other one"


def test_a_held_rollout_is_asked_for_again(hand: Hands) -> None:
    asked: list[int] = []

    def decide(ledger: Ledger, rollout: Any, cause: str) -> int | Hold:
        asked.append(rollout.id)
        return 0 if len(asked) > 2 else Hold("wait")

    drive = hand(replace(areal_async(), **call("route", decide)))
    assert not every(drive.begin(), Generate)
    while not drive.home:
        drive.tell(Phase, 0, "nothing", 0)
    assert asked == [0, 0, 0]


# ---- policies that can't go on


@pytest.mark.parametrize(
    ("slot", "decide", "words"),
    [
        ("admit", lambda ledger: None, "decide returned None"),
        ("admit", lambda ledger: [7], "7 is no Start"),
        ("admit", lambda ledger: [Start(0, 2, 1)], "1 ≤ need_n ≤ launch_n"),
        ("admit", lambda ledger: [Start(0, 1, 1), Start(0, 1, 1)], "prompt 0 is not waiting"),
        ("admit", lambda ledger: [Start(-1, 1, 1)], "prompt -1 is not waiting"),
        ("admit", lambda ledger: ledger.nothing, "AttributeError: 'Ledger' object has no attribute 'nothing'"),
        ("select", lambda ledger: [], "decide returned []"),
        ("select", lambda ledger: Batch([5], 0, True), "groups [5] are not in the buffer"),
        ("select", lambda ledger: Batch([], 0, True), "groups [] are not in the buffer"),
        ("select", lambda ledger: wait_for(ledger, lambda g: Batch([g, g], 0, True)), "a group is named twice"),
        ("select", lambda ledger: wait_for(ledger, lambda g: Batch([g], 1, True)), "index 1 is not 0"),
        ("expire", lambda ledger, trigger: "none", "decide returned 'none'"),
        ("expire", lambda ledger, trigger: [None], "None is no Verdict"),
        ("expire", lambda ledger, trigger: [Verdict(9, "drop", "")], "group 9 is neither running nor accepted"),
        ("publish", lambda ledger: 3, "decide returned 3"),
        ("publish", lambda ledger: trained(ledger, Install(5, [0])), "version 5 is not the trained one"),
        ("publish", lambda ledger: trained(ledger, Install(1, [])), "engine"),
        ("publish", lambda ledger: trained(ledger, Install(1, [9])), "engines [9]"),
        ("place", lambda ledger: None, "decide returned None"),
        ("place", lambda ledger: [Move(9, "trainer")], "names no device"),
        ("route", lambda ledger, rollout, cause: None, "decide returned None"),
        ("route", lambda ledger, rollout, cause: 9, "engine 9 does not take requests"),
    ],
)
def test_what_a_slot_may_not_answer(slot: str, decide: Callable[..., Any], words: str, hand: Hands) -> None:
    base = Disaggregated if slot == "place" else Slot
    drive = hand(replace(areal_async(), name="mine", **call(slot, decide, base)))
    with pytest.raises(PolicyError) as caught:
        drive.begin()
        drive.done(one(drive.finish(0), Train))
    message = str(caught.value)
    assert message.startswith(f"policy mine, slot {slot} (Odd): ") and words in message


def wait_for(ledger: Ledger, make: Callable[[int], Batch]) -> Batch | Wait:
    return make(next(iter(ledger.buffer))) if ledger.buffer else Wait("none")


def trained(ledger: Ledger, install: Install) -> Install | None:
    return install if ledger.x != ledger.v else None


@pytest.mark.parametrize("name", SLOTS)
def test_a_slot_that_can_not_start_is_named(name: str) -> None:
    class Odd(type(getattr(areal_async(), name)), frozen=True):  # type: ignore[misc]
        def start(self, shape: Shape, seed: int) -> None:
            raise KeyError("lost")

    with pytest.raises(PolicyError, match=rf"slot {name} \(Odd\): KeyError: 'lost'"):
        Controller(replace(areal_async(), **{name: Odd()}), Shape())


# ---- determinism


def test_two_controllers_given_the_same_facts_answer_the_same(hand: Hands) -> None:
    said = []
    for _ in "twice":
        drive = hand(AHEAD, engines=2, samples=2)
        drive.begin()
        out = [*drive.finish(0), *drive.finish(1)]
        said.append([*out, *update(drive, [one(out, Train)])])
    assert said[0] == said[1] and len(said[0]) > 10


def test_another_seed_shuffles_a_batch_otherwise() -> None:
    orders = set()
    for seed in range(8):
        controller = Controller(areal_async(), Shape(b=4, samples=1), seed)
        t = iter(range(1, 99))
        out = [*controller.handle(Installed(0, 0, 0, 0, 10)), *controller.handle(Begin(next(t)))]
        for command in every(out, Generate):
            rollout = command.work[0].rollout
            controller.handle(Segment(next(t), command.id, rollout, 0, 0, 1, "stop", 0))
            out = controller.handle(Scored(next(t), rollout))
        orders.add(tuple(one(out, Train).groups))
    assert len(orders) > 2 and all(sorted(order) == [0, 1, 2, 3] for order in orders)
