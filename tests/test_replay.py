"""Replay: a recorded history's facts give its commands and notes again, and what was tampered with is found."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.cli import main
from rlsched.commands import Command, Stop
from rlsched.controller import Controller
from rlsched.errors import InputError, PolicyError
from rlsched.facts import End, Fact
from rlsched.history import Reader, Writer
from rlsched.manifest import Manifest
from rlsched.naming import build, parse
from rlsched.notes import Go, Note
from rlsched.replay import Replay, compare, replay
from rlsched.sim.scenario import load
from rlsched.sim.world import World

POLICIES = (
    "verl-hybrid",
    "areal-async",
    "areal-async,admit.eta=1",
    "areal-async,admit.eta=2,expire=AgeBound,expire.bound=0,expire.requeue=true,select=FirstFinished,route=LeastLoaded",
    "areal-async,admit.eta=1,publish.fate=restart",
    "areal-async,admit.eta=1,publish.fate=drain",
    "areal-async,admit.eta=1,publish.fate=retract",
    "areal-async,admit.eta=1,publish.fate=keep",
)


@cache
def history(policy: str = "areal-async,admit.eta=1") -> tuple[Manifest, list[Any]]:
    """A short simulated run in which groups are rejected and rewards take time."""
    changes = ["shape.b=2", "shape.samples=2", "shape.engines=2", "shape.budget=300", "shape.steps=2"]
    events: list[Any] = []
    scenario = load(None, [*changes, "workload.reject=0.2", "workload.reward_s=0.05"])
    world = World(scenario, parse(policy), 0, events.append)
    assert world.run().ok
    return world.manifest, events


def again(head: Manifest, events: list[Any]) -> Replay:
    return compare(Controller(build(head.policy), head.shape, head.seed), events)


def write(path: Path, head: Manifest, events: list[Any]) -> Path:
    with Writer(path) as writer:
        writer.begin(head)
        for event in events:
            writer.write(event)
    return path


def answers(events: list[Any]) -> list[int]:
    """Where the commands and notes are."""
    return [i for i, event in enumerate(events) if not isinstance(event, Fact)]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_history_replays_exactly(policy: str, tmp_path: Path) -> None:
    head, events = history(policy)
    found = replay(Reader(write(tmp_path / "a.jsonl", head, events)))
    assert found.divergence is None
    assert found.answers == len(answers(events)) > 20
    assert found.facts == len(events) - found.answers


def altered(event: Any) -> Any:
    """The event with another value in its first number, or in its first text."""
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if isinstance(value, int | str) and not isinstance(value, bool):
            return replace(event, **{name: value + (1 if isinstance(value, int) else "!")})
    raise AssertionError(event)


def test_an_altered_answer_is_found_where_it_stands() -> None:
    head, events = history()
    for i in answers(events):
        found = again(head, [*events[:i], altered(events[i]), *events[i + 1 :]]).divergence
        assert found is not None and found.line == i + 2
        assert found.recorded == repr(altered(events[i])) and found.replayed == repr(events[i])


def test_a_removed_answer_is_found_where_it_stood() -> None:
    head, events = history()
    for i in answers(events):
        found = again(head, [*events[:i], *events[i + 1 :]]).divergence
        assert found is not None and found.line == i + 2 and found.replayed == repr(events[i])


def test_an_added_answer_is_found_where_it_stands() -> None:
    head, events = history()
    for i in range(len(events)):
        for extra in (Go("nobody"), Stop(999)):
            found = again(head, [*events[:i], extra, *events[i:]]).divergence
            assert found is not None and found.line == i + 2 and found.recorded == repr(extra)


def test_a_repeated_answer_is_found() -> None:
    head, events = history()
    for i in answers(events):
        found = again(head, [*events[: i + 1], *events[i:]]).divergence
        assert found is not None and found.line == i + 3


def test_answers_in_another_order_are_found() -> None:
    head, events = history()
    pairs = [i for i in answers(events)[:-1] if not isinstance(events[i + 1], Fact)]
    assert len(pairs) > 10
    for i in pairs:
        found = again(head, [*events[:i], events[i + 1], events[i], *events[i + 2 :]]).divergence
        assert found is not None and found.line == i + 2


def test_every_prefix_of_a_history_replays() -> None:
    """Within the answers of one fact, too: that is where a killed run's file may end."""
    head, events = history()
    for cut in range(len(events) + 1):
        found = again(head, events[:cut])
        assert found.divergence is None and found.facts + found.answers == cut


def test_a_history_without_its_end_is_open_and_replays(tmp_path: Path) -> None:
    head, events = history()
    assert isinstance(events[-1], End)
    reader = Reader(write(tmp_path / "a.jsonl", head, events[:-1]))
    found = replay(reader)
    assert found.divergence is None and reader.open
    assert found.facts + found.answers == len(events) - 1


def test_missing_answers_before_the_end_are_found() -> None:
    """A history that claims to be complete may not lack what the last fact called for."""
    head, events = history()
    while not isinstance(events[-2], Fact):
        events = [*events[:-2], events[-1]]
    found = again(head, events).divergence
    assert found is not None and found.line == len(events) + 1 and "End" in found.recorded


@pytest.mark.parametrize(("field", "value"), [("seed", 1), ("eta", 0), ("samples", 3)])
def test_another_manifest_is_another_run(field: str, value: int) -> None:
    head, events = history()
    if field == "seed":
        head = replace(head, seed=value)
    elif field == "samples":
        head = replace(head, shape=replace(head.shape, samples=value))
    else:
        head = replace(head, policy=replace(head.policy, slots={**head.policy.slots}))
        head.policy.slots["admit"] = replace(head.policy.slots["admit"], fields={"eta": value, "C": None})
    assert again(head, events).divergence is not None


def test_a_policy_that_raises_diverges_there(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rlsched.slots.select import FirstFinished\n\n"
        "class Odd(FirstFinished, frozen=True):\n"
        "    def decide(self, state, ledger):\n"
        "        raise LookupError('lost')\n"
    )
    head, events = history()
    odd = parse(f"areal-async,admit.eta=1,select={tmp_path}/mine.py:Odd")
    found = compare(Controller(odd, head.shape, head.seed), events).divergence
    assert found is not None and "slot select (Odd): LookupError: lost" in found.replayed


def test_a_slot_that_is_gone_is_bad_input(tmp_path: Path) -> None:
    head, events = history()
    slots = {**head.policy.slots, "admit": replace(head.policy.slots["admit"], type="rlsched.slots.admit:Gone")}
    path = write(tmp_path / "a.jsonl", replace(head, policy=replace(head.policy, slots=slots)), events)
    with pytest.raises(InputError, match="'Gone'"):
        replay(Reader(path))


def test_the_command_line_names_the_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    head, events = history()
    command = next(i for i, e in enumerate(events) if isinstance(e, Command))
    note = next(i for i, e in enumerate(events) if isinstance(e, Note))
    for name, broken, line in (
        ("altered", [*events[:command], altered(events[command]), *events[command + 1 :]], command + 2),
        ("removed", [*events[:note], *events[note + 1 :]], note + 2),
        ("added", [*events[:note], Go("nobody"), *events[note:]], note + 2),
    ):
        path = write(tmp_path / f"{name}.jsonl", head, broken)
        with pytest.raises(SystemExit) as end:
            main(["replay", str(path)])
        out, err = capsys.readouterr()
        assert (end.value.code, err) == (1, "")
        assert f"{path}, line {line}: the controller answers otherwise" in out


@given(st.data())
def test_lost_repeated_and_late_facts_never_break_the_controller(data: st.DataObject) -> None:
    """It may answer otherwise than the history, or say that a policy can't go on; it may not fall over."""
    head, events = history(data.draw(st.sampled_from(POLICIES)))
    facts = [event for event in events if isinstance(event, Fact) and not isinstance(event, End)]
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(facts) - 1))
        match data.draw(st.sampled_from(["lose", "repeat", "delay"])):
            case "lose":
                facts.pop(at)
            case "repeat":
                facts.insert(data.draw(st.integers(at, len(facts))), facts[at])
            case "delay":
                facts.insert(data.draw(st.integers(at, len(facts) - 1)), facts.pop(at))
    controller = Controller(build(head.policy), head.shape, head.seed)
    for fact in facts:
        try:
            controller.handle(fact)
        except PolicyError:
            break
