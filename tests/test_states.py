"""States: the document's steps label for label, honest names for what was there, and nothing that did not happen."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rlsched.cli import main
from rlsched.commands import Abort, Generate, Pause, Resume, Sleep, Train, Transfer, Wake, Work
from rlsched.errors import InputError
from rlsched.facts import Begin, Done, Down, Installed, Resident, Segment, Up, Updating
from rlsched.history import Event, Reader
from rlsched.labels import Labels, headings
from rlsched.manifest import Manifest, manifest
from rlsched.naming import parse
from rlsched.notes import Accept, Publish
from rlsched.policy import Policy, areal_async
from rlsched.shape import Shape
from rlsched.sim.scenario import Scenario, load
from rlsched.slots.admit import Barrier, Cap
from rlsched.slots.place import Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.states import Cycle, Fold, Step, pick, states
from rlsched.testing import Tally, assert_clean, policies, run, scenarios, seeds

from .test_properties import examples

# ---- what the document says: title, then the six labels

SAME, ON = "same GPUs (HYBRID)", "on-policy by construction"
VERL = [
    ("Generate rollouts", SAME, "weights and KV cache", "offloaded to CPU", "v", "none", ON),
    ("Wait for the full batch", SAME, "weights and KV cache", "offloaded to CPU", "v", "none", ON),
    ("Sleep the engine", SAME, "released by level-2 sleep", "offloaded to CPU", "v", "none", ON),
    (
        "Train the policy",
        SAME,
        "released by level-2 sleep",
        "parameters and optimizer on GPU",
        "trainer computes v+1",
        "none",
        ON,
    ),
    ("Copy weights through CUDA IPC", SAME, "weights only", "parameters on GPU", "v+1", "CUDA IPC buckets", ON),
    ("Hand the GPUs back", SAME, "weights and fresh KV cache", "offloaded to CPU", "v+1", "CUDA IPC buckets", ON),
]

APART, OWN, BOTH = "separate GPUs", "on its own GPUs", "engines v, trainer v+1"
AWAKE, NCCL, CAP = "weights and KV cache", "NCCL broadcast buckets", "admission cap, η = 0 by default"
AREAL = [
    ("Admit rollouts under the cap", APART, AWAKE, OWN, "v", "none", CAP),
    ("Collect accepted trajectories", APART, AWAKE, OWN, "v", "none", CAP),
    ("Train while engines generate", APART, AWAKE, "computes v+1", BOTH, "none", CAP),
    ("Pause and interrupt", APART, "paused, running requests aborted", "finished v+1", BOTH, "none", CAP),
    ("Broadcast new weights", APART, "weights v+1, no running requests", OWN, "v+1", NCCL, CAP),
    (
        "Resume interrupted requests",
        APART,
        "weights v+1, requests resumed",
        OWN,
        "v+1",
        NCCL,
        "one trajectory can mix v and v+1",
    ),
]

Row = tuple[str, ...]


def rows(cycle: Cycle) -> list[Row]:
    """Title and labels of each step."""
    return [(s.title, *msgspec.structs.astuple(s.state)) for s in cycle.steps]


def at_eta(eta: int, expected: Iterable[Row]) -> list[Row]:
    """The document names the default η, under which its own steps 3 to 6 can't occur: see docs/states.md."""
    return [(*row[:6], row[6].replace("η = 0 by default", f"η = {eta}")) for row in expected]


class History(NamedTuple):
    manifest: Manifest
    events: list[Event]


@cache
def simulated(policy: str, *changes: str) -> History:
    """A simulated GPU history."""
    small = ("shape.b=8", "shape.samples=4", "shape.engines=2", "shape.steps=3", "shape.budget=512")
    found = run(load(None, (*small, *changes)), parse(policy), 0)
    assert_clean(found)
    return History(found.manifest, found.events)


def shown(policy: str, version: int | None = None) -> list[Row]:
    history = simulated(policy)
    return rows(pick(states(history.manifest, history.events), version))


# ---- label for label


def test_verl_hybrid_gives_the_six_steps() -> None:
    assert shown("verl-hybrid") == VERL
    assert shown("verl-hybrid", 1) == VERL  # the warm-up differs in nothing that a label says
    assert shown("verl-hybrid", 3) == VERL


def test_areal_async_at_eta_1_gives_the_six_steps() -> None:
    assert shown("areal-async,admit.eta=1") == at_eta(1, AREAL)


def test_the_default_scenario_gives_them_too() -> None:
    """As ``rlsched simulate`` runs it: four engines, 32 groups of 8 samples."""
    for policy, expected in (("verl-hybrid", VERL), ("areal-async,admit.eta=1", at_eta(1, AREAL))):
        found = run(load(None, ("shape.steps=2",)), parse(policy), 0)
        assert rows(pick(states(found.manifest, found.events))) == expected


def test_they_are_those_of_the_document(shared_data: Path) -> None:
    """Compared with the document itself, where it is at hand."""
    path = shared_data.parent / "seeds" / "rl-step-trace.json"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    document = json.loads(path.read_text())
    fields = list(Labels.__struct_fields__)
    assert [*document["stateLabels"]] == fields
    for policy, eta in (("verl-hybrid", None), ("areal-async,admit.eta=1", 1)):
        place = simulated(policy).manifest
        assert headings(place) == [*document["stateLabels"].values()]
        scenario = document["scenarios"][0 if eta is None else 1]
        expected = [(s["title"], *(s["state"][f] for f in fields)) for s in scenario["steps"]]
        assert expected == (VERL if eta is None else AREAL)
        assert shown(policy) == (expected if eta is None else at_eta(eta, expected))


# ---- η = 0


def test_at_eta_0_nothing_is_claimed_that_did_not_happen() -> None:
    """What is left of AReaL's steps when nothing is in flight at the update."""
    assert shown("areal-async") == [
        AREAL[0],
        AREAL[1],
        ("Train the policy", *AREAL[2][1:]),
        ("Pause", APART, "paused, no running requests", "finished v+1", BOTH, "none", CAP),
        ("Broadcast new weights", APART, "weights v+1", OWN, "v+1", NCCL, CAP),
        ("Resume generation", APART, "weights v+1", OWN, "v+1", NCCL, CAP),
    ]


def calls_back(events: Iterable[Event]) -> bool:
    """Whether a rollout was ever called back to go on, or sent with tokens that it had."""
    resent = (w for e in events if isinstance(e, Generate) for w in e.work if w.have)
    return any(isinstance(e, Abort) and e.fate != "cancel" for e in events) or any(resent)


def test_at_eta_0_nothing_is_in_flight_at_an_update() -> None:
    """So nothing can be interrupted, whatever the other slots are. The same worlds at η = 1 do interrupt."""
    seen = Tally()
    at_0 = st.builds(Cap, st.just(0), st.none() | st.integers(1, 8)) | st.just(Barrier())

    @examples(60)
    @given(scenarios(), policies(admit=at_0), seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        found = run(scenario, policy, seed)
        assert not calls_back(found.events)
        live: set[int] = set()
        published = 0
        for event in found.events:
            match event:
                case Publish():
                    assert not live
                    published = event.version
                case Generate():
                    live |= {w.rollout for w in event.work}
                case Segment():
                    live.discard(event.rollout)
                case Abort():
                    live -= {*event.rollouts}  # of a rejected group, or of one that needs it no more
                case Transfer() if event.version > published:
                    assert not live
        for cycle in states(found.manifest, found.events):
            assert not cycle.interrupted and not cycle.resent
            for step in cycle.steps:
                told = " ".join((step.title, step.state.engine, step.state.staleness))
                assert not any(word in told for word in ("abort", "nterrupt", "resumed", "restarted", "mix"))
        ahead = replace(policy, admit=Cap(1), place=Disaggregated(), publish=areal_async().publish)
        seen.add(interrupts=calls_back(run(scenario, ahead, seed).events))

    holds()
    seen.demand(interrupts=0.3)


# ---- any history


def test_the_claims_of_any_cycle_are_in_its_history() -> None:
    """Over random worlds and policies: each step is at its event, and each claim is recounted from the events."""
    seen = Tally()
    begins = {"dispatch": Generate, "accept": Accept, "sleep": Done, "train": Train, "pause": Done, "wake": Done}

    inside = policies(
        admit=st.builds(Cap, st.integers(1, 2), st.integers(4, 16)),
        publish=st.sampled_from((EveryVersion(fate="keep"), EveryVersion(fate="retract"))),
        place=st.just(Disaggregated()),
    )

    @examples(180)
    @given(scenarios(), policies() | policies() | inside, seeds())
    def holds(scenario: Scenario, policy: Policy, seed: int) -> None:
        found = run(scenario, policy, seed)
        cycles = states(found.manifest, found.events)
        assert [c.version for c in cycles] == [*range(1, scenario.shape.steps + 1)]
        aborted, within = recount(found.events)
        for cycle in cycles:
            lines = [s.line for s in cycle.steps]
            assert lines == sorted(lines)
            kinds = Counter(s.kind for s in cycle.steps)
            assert kinds["train"] == kinds["update"] == 1 and max(kinds.values()) == 1
            for step in cycle.steps:
                event = found.events[step.line - 2]
                assert isinstance(event, begins.get(step.kind, object)), (step, event)
                if step.kind == "train":
                    assert isinstance(event, Train) and (event.version, event.index) == (cycle.version, 0)
                if step.kind == "update":
                    assert isinstance(event, Updating) and event.version == cycle.version
            assert cycle.interrupted == (cycle.version in aborted)
            text = " ".join(s.state.engine for s in cycle.steps)
            assert ("aborted" in text) <= cycle.interrupted
            assert ("resumed" in text or "restarted" in text) <= cycle.resent
            mixed = any("mix" in s.state.staleness for s in cycle.steps)
            fate = getattr(policy.publish, "fate", "")
            assert mixed <= (fate in ("resume", "retract", "keep"))
            assert cycle.within == (cycle.version in within)
            assert cycle.within <= mixed
            assert ("requests kept" in text.replace("running requests kept", "")) <= (fate == "keep" and cycle.within)
            assert ("retracted" in text) <= (fate == "retract" and cycle.within)
            slept = "sleep" in kinds
            seen.add(interrupted=cycle.interrupted, resent=cycle.resent, mixed=mixed, slept=slept, within=cycle.within)

    holds()
    seen.demand(interrupted=0.1, resent=0.07, mixed=0.1, slept=0.03, within=0.04)


def recount(events: Iterable[Event]) -> tuple[set[int], set[int]]:
    """Versions whose update made rollouts come back, ids between the end of training and the next one's beginning;
    and those through whose update requests lived."""
    trained, named, found, within = 0, set[int](), set[int](), set[int]()
    training: dict[int, Train] = {}
    for event in events:
        match event:
            case Train():
                training[event.id] = event
            case Done() if event.cmd in training and training[event.cmd].last:
                trained = training[event.cmd].version
            case Abort() if event.fate != "cancel":
                named |= {*event.rollouts}
            case Segment() if event.end == "abort" and event.rollout in named:
                found.add(trained)
            case Segment() if event.end == "install":
                within.add(trained)
            case _:
                pass
    return found, within


def test_a_prefix_shows_what_was_reached() -> None:
    """Cut anywhere, a history shows the same steps up to there; only a resume may yet be told again."""
    history = simulated("areal-async,admit.eta=1")
    whole = {c.version: c for c in states(history.manifest, history.events)}
    fold = Fold(history.manifest)
    for line, event in enumerate(history.events, start=2):
        fold.feed(line, event)
        if line % 50:
            continue
        for cycle in fold.cycles():
            final = whole[cycle.version].steps
            n = len(cycle.steps)
            assert [s for s in cycle.steps if s.kind != "resume"] == [s for s in final[:n] if s.kind != "resume"]


def test_the_cycle_that_shows_the_most_is_picked() -> None:
    """Interruptions first, then steps, then one that waited for its batch, then one after the warm-up."""
    history = simulated("areal-async,admit.eta=1")
    cycles = states(history.manifest, history.events)
    assert [c.version for c in cycles] == [1, 2, 3]
    assert [c.interrupted for c in cycles] == [True, True, True]
    assert [c.resent for c in cycles] == [True, True, False]  # at the end nothing goes on
    assert pick(cycles).version == 2
    assert pick([cycles[0], cycles[2]]).version == 1
    assert pick(cycles, 3).version == 3
    with pytest.raises(InputError, match=r"no cycle leads to version 4; there are 1 to 3"):
        pick(cycles, 4)
    with pytest.raises(InputError, match="no cycle"):
        pick([])


# ---- variants of the policies

MIXED = "one trajectory can mix v and v+1"


def inside(how: str) -> list[str]:
    """What engines hold in the steps of a cycle whose update requests live through."""
    kept = "running requests kept"
    return [AWAKE] * 3 + [f"paused, {kept}", f"weights v+1, {kept}", f"weights v+1, requests {how}"]


@pytest.mark.parametrize(
    ("policy", "label", "expected"),
    [
        ("verl-hybrid,place.offload=[],place.load=[]", "trainer", ["parameters and optimizer on GPU"] * 6),
        ("verl-hybrid,place.sleep=1", "engine", [VERL[i][2].replace("level-2", "level-1") for i in range(6)]),
        ("verl-hybrid,place.sleep=1", "version", ["v", "v", "v", BOTH, "v+1", "v+1"]),  # the host keeps v
        ("areal-async,admit.eta=1,publish.fate=drain", "engine", [AWAKE] * 3 + ["paused, no running requests"]),
        (
            "areal-async,admit.eta=1,publish.fate=restart",
            "engine",
            [*(row[2] for row in AREAL[:5]), "weights v+1, requests restarted"],
        ),
        ("areal-async,admit.eta=1,publish.fate=restart", "staleness", ["admission cap, η = 1"] * 6),
        ("areal-async,admit.eta=1,publish.fate=keep", "engine", inside("kept")),
        ("areal-async,admit.eta=1,publish.fate=retract", "engine", inside("retracted")),
        *(
            (f"areal-async,admit.eta=1,publish.fate={fate}", "staleness", ["admission cap, η = 1"] * 4 + [MIXED] * 2)
            for fate in ("keep", "retract")
        ),
        ("areal-async,admit.eta=2,expire=AgeBound,expire.bound=1", "staleness", ["admission cap, η = 2, age ≤ 1"] * 5),
        (
            "areal-async,admit.eta=1,publish.rolling=true",
            "version",
            ["v", "v", BOTH, BOTH, *["engines v and v+1, trainer v+1"] * 2],
        ),
        (
            "areal-async,admit.eta=1,publish.rolling=true",
            "engine",
            [AWAKE] * 3 + [f"1 of 2 paused, running requests aborted; 1 of 2 {AWAKE}"],
        ),
        ("areal-async,admit=Barrier", "staleness", [ON] * 6),
    ],
)
def test_what_a_policy_does_otherwise_is_told(policy: str, label: str, expected: list[str]) -> None:
    history = simulated(policy)
    cycle = pick(states(history.manifest, history.events))
    assert [getattr(s.state, label) for s in cycle.steps][: len(expected)] == expected


# ---- honest names

CPU = {"device": "cores", "ipc": "shared memory", "broadcast": "gloo", "sleep_frees": "weights, kv"}
HOST = "parameters and optimizer in host memory"


def named(expected: Iterable[Row], **names: str) -> list[Row]:
    """The document's rows in the words for cores; ``names`` are whole labels by their word in ``DEVICES``."""
    words = {
        SAME: "same cores",
        APART: "separate cores",
        OWN: "on its own cores",
        "offloaded to CPU": HOST,
        "parameters and optimizer on GPU": HOST,
        "parameters on GPU": HOST,
        "CUDA IPC buckets": "shared memory buckets",
        NCCL: "gloo broadcast buckets",
        "Copy weights through CUDA IPC": "Copy weights through shared memory",
        "Hand the GPUs back": "Hand the cores back",
        **names,
    }
    return [tuple(words.get(text, text) for text in row) for row in expected]


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ("verl-hybrid,place.offload=[],place.load=[]", named(VERL)),
        ("areal-async,admit.eta=1", named(at_eta(1, AREAL))),
    ],
)
def test_cores_are_called_cores(policy: str, expected: list[Row]) -> None:
    """The same events with the labels of a CPU run, where trainer parts stay where they are."""
    history = simulated(policy)
    place = replace(history.manifest, labels=CPU)
    found = rows(pick(states(place, history.events)))
    assert found == expected
    assert not any(word in text for row in found for text in row for word in ("GPU", "CUDA", "NCCL", "HYBRID"))
    assert headings(place)[1] == "Engine memory"


def test_a_sleep_released_only_what_it_freed() -> None:
    """Facts and manifest must agree that memory is given back; without either nothing is claimed."""

    def asleep(labels: dict[str, str], level: int = 2, *, kept: tuple[int, int] | None = (0, 0)) -> str:
        hand = Hand("verl-hybrid", labels)
        if kept is not None:
            hand(Resident(0, 0, 0, "engine", "weights", 7), Resident(0, 0, 0, "engine", "kv", 9))
        hand(Sleep(1, 0, level))
        if kept is not None:
            hand(Resident(1, 1, 0, "engine", "weights", kept[0]), Resident(1, 1, 0, "engine", "kv", kept[1]))
        hand(Done(1, 1))
        return hand.last(1).state.engine

    assert asleep({"device": "GPU"}) == "released by level-2 sleep"
    assert asleep({"device": "GPU"}, kept=None) == "asleep at level 2"
    assert asleep({"device": "GPU"}, kept=(7, 9)) == "asleep at level 2"
    assert asleep(CPU) == "released by level-2 sleep"
    assert asleep(CPU, kept=None) == "released by level-2 sleep"
    assert asleep(CPU, 1, kept=(7, 0)) == "KV cache released by level-1 sleep"
    assert asleep({**CPU, "sleep_frees": "nothing"}) == "asleep at level 2, nothing released"
    assert asleep({**CPU, "sleep_frees": "nothing"}, kept=(7, 9)) == "asleep at level 2, nothing released"
    assert asleep({**CPU, "sleep_frees": "nothing"}, kept=None) == "asleep at level 2"
    assert asleep({**CPU, "sleep_frees": "weights"}) == "weights released by level-2 sleep"


# ---- by hand


class Hand:
    """A history told by hand, for one engine."""

    def __init__(self, policy: str, labels: dict[str, str] | None = None, engines: int = 1) -> None:
        chosen = parse(policy)
        shape = Shape(b=1, k=1, samples=1, engines=engines)
        self.fold = Fold(manifest("sim", chosen, shape, 0, labels=labels or {"device": "GPU", "broadcast": "NCCL"}))
        self.line = 1
        self(*(Installed(0, 0, e, 0, 1) for e in range(engines)), Begin(0))

    def __call__(self, *events: Any) -> None:
        for event in events:
            self.line += 1
            self.fold.feed(self.line, event)

    def cycle(self, version: int) -> Cycle:
        return pick(self.fold.cycles(), version)

    def last(self, version: int) -> Step:
        """The newest step of the cycle that produces ``version``."""
        return self.cycle(version).steps[-1]


def send(id: int, rollout: int, have: int = 0, engine: int = 0) -> Generate:
    return Generate(id, engine, [Work(rollout, rollout, have=have)])


def test_a_resume_without_tokens_of_v_mixes_nothing() -> None:
    """A request that came back before its first token has only one version."""
    for n, rule in ((3, "one trajectory can mix v and v+1"), (0, "admission cap, η = 1")):
        hand = Hand("areal-async,admit.eta=1")
        hand(send(1, 0), Segment(0, 1, 0, 0, 0, 5, "stop", 0), send(2, 1))
        hand(Train(3, 1, 0, True, [0], [0]), Done(1, 3))
        hand(Abort(4, 0, [1], "resume"), Segment(2, 2, 1, 0, 0, n, "abort", 0), Done(2, 2), Done(2, 4))
        hand(Pause(5, 0), Done(3, 5))
        assert hand.last(1).state.engine == "paused, running requests aborted"
        hand(Transfer(6, 1, [0], "broadcast", 1), Updating(4, 6, 0, 1), Installed(5, 6, 0, 1, 1), Done(5, 6))
        hand(Publish(1, [0]), Resume(7, 0), send(8, 1, n))
        assert hand.last(1).title == "Broadcast new weights"  # nobody has resumed yet
        assert hand.last(1).state.engine == "weights v+1, no running requests"
        hand(Done(6, 7))
        assert hand.last(1).title == "Resume interrupted requests"
        assert hand.last(1).state.engine == "weights v+1, requests resumed"
        assert hand.last(1).state.staleness == rule


def test_who_is_called_back_by_no_update_is_not_interrupted() -> None:
    """A parked rollout waits for the next version and then mixes; one that only moves house resumes nothing."""
    hand = Hand("areal-async,admit.eta=1", engines=2)
    hand(send(1, 0), send(2, 1), send(3, 2))
    for id, rollout in ((4, 0), (5, 1)):
        hand(Abort(id, 0, [rollout], "resume"), Segment(1, rollout + 1, rollout, 0, 0, 3, "abort", 0), Done(1, id))
    hand(send(6, 1, 3, engine=1), Segment(2, 6, 1, 1, 0, 4, "stop", 0), Segment(2, 3, 2, 0, 0, 4, "stop", 0))
    assert hand.last(1).kind == "dispatch"
    hand(Train(7, 1, 0, True, [1], [1]), Done(3, 7), Pause(8, 0), Pause(9, 1), Done(4, 8), Done(4, 9))
    assert (hand.last(1).title, hand.last(1).state.engine) == ("Pause", "paused, no running requests")
    hand(Transfer(10, 1, [0, 1], "broadcast", 1))
    for engine in (0, 1):
        hand(Updating(5, 10, engine, 1), Installed(6, 10, engine, 1, 1))
    hand(Done(6, 10), Publish(1, [0, 1]), Resume(11, 0), Resume(12, 1), send(13, 0, 3), Done(7, 11), Done(7, 12))
    assert hand.last(1).title == "Resume interrupted requests"
    assert hand.last(1).state.staleness == "one trajectory can mix v and v+1"
    assert not hand.cycle(1).interrupted and hand.cycle(1).resent
    assert [c.version for c in hand.fold.cycles()] == [1]  # no new request under version 1 yet
    hand(send(14, 7, 2))
    assert [c.version for c in hand.fold.cycles()] == [1]  # nor is one that brings tokens along
    hand(send(15, 8))
    assert hand.last(2).kind == "dispatch"


def test_kept_requests_are_told() -> None:
    """Requests that stay in a paused engine go on under the next version."""
    hand = Hand("areal-async,admit.eta=1")
    hand(send(1, 0), send(2, 1), Train(3, 1, 0, True, [0], [0]), Done(1, 3), Pause(4, 0), Done(2, 4))
    assert hand.last(1).title == "Pause"
    assert hand.last(1).state.engine == "paused, running requests kept"
    hand(Transfer(5, 1, [0], "broadcast", 1), Segment(3, 2, 1, 0, 0, 4, "install", 0), Updating(3, 5, 0, 1))
    hand(Installed(4, 5, 0, 1, 1), Done(4, 5))
    assert hand.last(1).state.engine == "weights v+1, running requests kept"
    assert hand.last(1).state.staleness == "one trajectory can mix v and v+1"


def test_an_update_that_tore_leaves_no_version_whole() -> None:
    hand = Hand("areal-async")
    hand(send(1, 0), Train(2, 1, 0, True, [0], [0]), Done(1, 2))
    hand(Transfer(3, 1, [0], "broadcast", 1), Updating(2, 3, 0, 1), Installed(3, 3, 0, 1, 0, ok=False))
    assert hand.last(1).kind == "train"
    hand(Done(3, 3, ok=False, why="torn"))
    assert hand.last(1).state.engine == "no version whole"


def test_an_engine_that_went_down_is_not_waited_for() -> None:
    hand = Hand("areal-async", engines=2)
    hand(
        send(1, 0),
        Segment(0, 1, 0, 0, 0, 5, "stop", 0),
        Train(2, 1, 0, True, [0], [0]),
        Done(1, 2),
        Pause(3, 0),
        Pause(4, 1),
        Done(2, 3),
    )
    assert hand.last(1).kind == "train"
    hand(Down(3, 1, "killed"))
    assert hand.last(1).kind == "pause"
    assert hand.last(1).state.engine == "paused, no running requests"
    hand(Up(4, 1), Transfer(5, 1, [0], "broadcast", 1), Updating(5, 5, 0, 1), Installed(5, 5, 0, 1, 1), Done(5, 5))
    assert hand.last(1).state.engine == "1 of 2 weights v+1; 1 of 2 no version whole"


def test_a_wake_of_the_weights_alone_is_no_step() -> None:
    hand = Hand("verl-hybrid")
    hand(send(1, 0), Sleep(2, 0, 2), Done(1, 2), Train(3, 1, 0, True, [0], [0]), Done(2, 3))
    hand(Wake(4, 0, ["weights"]), Done(3, 4))
    assert hand.last(1).kind == "train"
    hand(Wake(5, 0, ["kv"]), Done(4, 5))
    assert hand.last(1).kind == "wake"
    assert hand.last(1).state.engine == "no version whole"  # nothing was installed yet


# ---- the command line


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "rlsched", *arguments], capture_output=True, text=True, check=False)


def test_the_command_shows_a_cycle(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a table and as JSON, also of a history that is open or cut within a line."""
    path = tmp_path / "h.jsonl"
    small = ("shape.b=8", "shape.samples=4", "shape.engines=2", "shape.budget=512")
    changes = [f"--with={c}" for c in small]
    with pytest.raises(SystemExit):
        main(["simulate", "areal-async,admit.eta=1", "--steps=3", *changes, "-o", str(path)])
    capsys.readouterr()

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            main(["states", *arguments])
        return int(end.value.code or 0), *capsys.readouterr()

    status, out, _ = call(str(path), "--json")
    told = json.loads(out)
    assert status == 0 and told["cycle"]["version"] == 2
    assert [(s["title"], *s["state"].values()) for s in told["cycle"]["steps"]] == at_eta(1, AREAL)
    status, out, _ = call(str(path), "--version", "3")
    assert status == 0 and "v = 2, v+1 = 3" in out and "6. Resume" in out
    status, out, err = call(str(path), "--version=7")
    assert (status, out) == (2, "") and err == "rlsched: no cycle leads to version 7; there are 1 to 3\n"

    lines = path.read_bytes().splitlines(keepends=True)
    cut = next(i for i, line in enumerate(lines) if b'"ev":"train"' in line)
    path.write_bytes(b"".join(lines[: cut + 1]) + lines[cut + 1][:9])
    assert call(str(path))[0] == 2
    status, out, _ = call(str(path), "--salvage", "--json")
    assert [s["kind"] for s in json.loads(out)["cycle"]["steps"]] == ["dispatch", "accept", "train"]
    path.write_bytes(lines[0])
    status, out, err = call(str(path))
    assert (status, out) == (2, "") and err.count("\n") == 1


# ---- real runs


@pytest.mark.real
@pytest.mark.parametrize(
    ("policy", "steps", "expected"),
    [
        ("verl-hybrid", 2, named(VERL)),
        ("areal-async,admit.eta=1", 3, named(at_eta(1, AREAL))),
    ],
)
def test_a_recorded_run_on_cores_gives_the_same_steps(
    policy: str, steps: int, expected: list[Row], tmp_path: Path
) -> None:
    """With names of what was there: cores, shared memory, gloo, and memory that really is given back."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    path = tmp_path / "h.jsonl"
    done = command("run", policy, "--paced", "--steps", str(steps), "-o", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    reader = Reader(path)
    if reader.manifest.labels["device"] != "cores":
        pytest.skip("the engine is not on cores")
    assert rows(pick(states(reader.manifest, reader.events()))) == expected


TRACES = Path(__file__).parent.parent / "traces"
KEPT = {"released by level-2 sleep": "asleep at level 2, nothing released"}
"""What a sleep is called where nothing is given back: of vLLM and SGLang on a CPU."""


@pytest.mark.parametrize(
    ("trace", "expected"),
    [
        ("transformers-verl-hybrid", named(VERL)),
        ("vllm-verl-hybrid", named(VERL, **KEPT)),
        ("sglang-verl-hybrid", named(VERL, **KEPT)),
        ("transformers-areal-async_admit.eta_1", named(at_eta(1, AREAL))),
        ("vllm-areal-async_admit.eta_1", named(at_eta(1, AREAL))),
        ("sglang-areal-async_admit.eta_1", named(at_eta(1, AREAL))),
    ],
)
def test_the_recorded_traces_give_the_same_steps(trace: str, expected: list[Row]) -> None:
    """On every engine the six steps of the document, and no label that claims a GPU."""
    reader = Reader(TRACES / f"{trace}.jsonl.zst")
    found = rows(pick(states(reader.manifest, reader.events())))
    assert found == expected
    assert not any(word in text for row in found for text in row for word in ("GPU", "CUDA", "NCCL", "HYBRID"))
