"""The formulas of staleness, against AReaL's own tests and against each other."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsched.books import refresh
from rlsched.commands import Generate
from rlsched.decisions import Batch, Wait
from rlsched.facts import Phase
from rlsched.ledger import Engine, Group, Ledger, Rollout, Span
from rlsched.notes import Reject
from rlsched.policy import areal_async, replace
from rlsched.shape import Shape
from rlsched.slot import Slot
from rlsched.slots.admit import Cap
from rlsched.slots.route import RoundRobin
from rlsched.slots.select import OldestFinished
from rlsched.staleness import age, capacity, outstanding_limit, restored

UNMAPPED = {
    "segments": "splits a dumped token mask into turns; rlsched keeps no masks, only segments as engines report them",
    "life-05": "accepts what was never submitted, which makes running negative; rlsched counts such a fact as ignored",
    "life-06": "ten threads on one lock; the controller has no thread",
}
"""Kinds and vectors of AReaL's that have no counterpart, and why."""

MAPPED = (
    *("capacity", "recover", "pending_limit", "round_robin", "lifecycle", "admission_sequence", "select", "group"),
    "version_rle",
)


@pytest.fixture(scope="module")
def vectors(shared_data: Path) -> list[dict[str, Any]]:
    """Inputs and expected outputs from AReaL v2.1.0's tests."""
    return json.loads((shared_data / "areal_vectors.json").read_text())


@pytest.fixture
def of_kind(vectors: list[dict[str, Any]]) -> Callable[..., list[tuple[str, dict[str, Any], dict[str, Any]]]]:
    """Vectors of a kind that have a counterpart: id, inputs, expected; at least ``least`` of them."""

    def choose(kind: str, least: int) -> list[tuple[str, dict[str, Any], dict[str, Any]]]:
        found = [
            (v["id"], v["inputs"], v["expected"]) for v in vectors if v["kind"] == kind and v["id"] not in UNMAPPED
        ]
        assert len(found) >= least
        return found

    return choose


class Idle(Slot, frozen=True):
    """Never trains."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        return Wait("idle")


# ---- AReaL's vectors


def test_every_vector_is_mapped_or_its_absence_explained(vectors: list[dict[str, Any]]) -> None:
    kinds = Counter(v["kind"] for v in vectors)
    assert {*kinds} == {*MAPPED, "segments"}
    assert {"life-05", "life-06"} <= {v["id"] for v in vectors}


def test_capacity_is_areals(of_kind: Any) -> None:
    for id, given_, expected in of_kind("capacity", 20):
        found = capacity(
            given_["eta"],
            given_["max_concurrent"],
            given_["batch"],
            given_["version"],
            given_["accepted"],
            given_["running"],
        )
        good = {"eq": found == expected["capacity"], "lt": found < expected["capacity"], "ge": found >= 0}
        assert good[expected["rel"]], (id, found)


def test_recovery_is_areals(of_kind: Any) -> None:
    for id, given_, expected in of_kind("recover", 4):
        version, b = given_["recovered_version"], given_["batch"]
        accepted = restored(version, b)
        assert accepted == expected["accepted"], id
        found = capacity(given_["eta"], given_["max_concurrent"], b, version, accepted, given_["running"])
        assert found == expected["capacity"], id


def test_pending_limit_is_areals(of_kind: Any) -> None:
    for id, given_, expected in of_kind("pending_limit", 1):
        assert outstanding_limit(given_["eta"], given_["batch"]) == expected["limit"], id


def test_round_robin_is_areals(of_kind: Any) -> None:
    for id, given_, expected in of_kind("round_robin", 1):
        engines = {e: Engine(e) for e in range(given_["workers"])}
        ledger = Ledger(Shape(), 0, [], engines)
        refresh(ledger)
        order = [RoundRobin().decide(None, ledger, Rollout(g, g, 0), "new") for g in range(given_["picks"])]
        assert order == expected["order"], id


def test_lifecycle_is_areals(of_kind: Any, hand: Any) -> None:
    """A group's submission is its admission: nothing is enqueued outside the controller."""
    for id, given_, expected in of_kind("lifecycle", 3):
        counts: Counter[str] = Counter()
        for name, n in given_["ops"]:
            counts[name.removeprefix("enqueue+")] += n
        n = counts["submit"]
        drive = hand(replace(areal_async(), admit=Cap(eta=99, C=99), select=Idle()), b=1, prompts=n)
        drive.begin()
        for rollout in range(counts["accept"] + counts["reject"]):
            drive.finish(rollout, keep=rollout < counts["accept"])
        ledger = drive.ledger
        found = (len(ledger.waiting), len(ledger.running), ledger.counters.accepted, ledger.counters.rejected)
        assert found == tuple(expected[k] for k in ("enqueued", "running", "accepted", "rejected")), id


def test_admission_sequences_are_areals(of_kind: Any, hand: Any) -> None:
    """Admit as capacity allows, finish everything, and see whether as many results came as are waited for."""
    for id, given_, expected in of_kind("admission_sequence", 6):
        for samples in given_["group_sizes"]:
            policy = replace(areal_async(), admit=Cap(eta=given_["eta"], C=given_["max_concurrent"]), select=Idle())
            (_, first), (_, wait), (_, version), (_, more), (_, wait_again) = given_["script"]
            drive = hand(policy, b=given_["batch"], samples=samples, steps=9, prompts=first)
            drive.begin()
            available = finish_all(drive)
            assert available == expected["first_available"], id
            assert (available >= wait) == (expected["first_wait"] == "ok"), id
            taken = wait if available >= wait else 0
            drive.ledger.shape = replace(drive.ledger.shape, prompts=first + more)
            drive.ledger.v = drive.ledger.x = version
            for engine in drive.ledger.engines.values():
                engine.installed = version
            drive.tell(Phase, 0, "nothing", 0)
            total = finish_all(drive)
            assert total <= expected["accepted_total_max"], id
            assert (total - taken >= wait_again) == (expected["second_wait"] == "ok"), id
            assert total == expected["accepted_total_max"], f"{id}: the bound was not reached"


def finish_all(drive: Any) -> int:
    """Let everything that is live finish, until nothing is; groups accepted so far."""
    while live := sorted(r for e in drive.ledger.engines.values() for r in e.live):
        assert len(drive.ledger.running) <= drive.controller.policy.admit.C
        for rollout in live:
            drive.finish(rollout)
    return int(drive.ledger.accepted)


def test_selection_is_areals(of_kind: Any) -> None:
    for id, given_, expected in of_kind("select", 2):
        done = given_.get("drained") or given_["done"]
        count = given_["count"]
        ledger = Ledger(Shape(b=count), 5, [], {})
        for item in done:
            g = item["task"]
            ledger.groups[g] = Group(g, g, 0, 0, 1, 1, g, [], "train", "accepted", begun=round(item["create"]))
            ledger.buffer[g] = 0
        for g in {*given_.get("active", [])} - {*ledger.buffer}:
            ledger.running[g] = None
        choice = OldestFinished(shuffle=not given_["deterministic"]).decide(None, ledger)
        assert isinstance(choice, Batch)
        if expected["ordered"]:
            assert choice.groups == expected["selected"], id
        assert {*choice.groups} == {*expected["selected"]}, id
        assert [g for g in ledger.buffer if g not in choice.groups] == expected["pending"], id


def test_a_groups_samples_run_together_and_stand_or_fall_together(of_kind: Any, hand: Any) -> None:
    (_, together, order), (_, failing, nothing) = of_kind("group", 2)
    drive = hand(areal_async(), samples=together["group_size"])
    sent = [line for line in drive.begin() if isinstance(line, Generate)]
    assert sum(len(line.work) for line in sent) == order["max_active"]
    for rollout in sorted(order["order"], key=lambda r: together["durations"][r]):
        out = drive.finish(rollout)
    (train,) = [line for line in out if type(line).__name__ == "Train"]
    assert sorted(train.rollouts) == order["order"]

    assert failing["drop_incomplete"] and nothing["result"] is None
    drive = hand(areal_async(), samples=failing["group_size"])
    drive.begin()
    drive.finish(0)
    out = drive.tokens(1, 0, "error")
    assert [line for line in out if isinstance(line, Reject)] == [Reject(0, "rollout 1 failed")]
    assert drive.ledger.accepted == 0


def test_versions_of_a_rollouts_tokens_are_areals(of_kind: Any, hand: Any) -> None:
    """Masked tokens have no version; those of one version in a row are one span."""
    for id, given_, expected in of_kind("version_rle", 2):
        drive = hand(areal_async(), budget=99)
        drive.begin()
        pairs = zip(given_["versions"], given_["mask"], strict=True)
        # A request tells of a version's tokens once, when it lives through the install of the next.
        for version, tokens in groupby(version for version, mask in pairs if mask):
            drive.tokens(0, len([*tokens]), "install", version)
        spans = drive.ledger.rollouts[0].spans
        assert [[s.version, s.n] for s in spans] == expected["rle"], id
        oldest = drive.ledger.rollouts[0].oldest
        assert (-1 if oldest is None else oldest) == expected["head"], id
        assert (spans[-1].version if spans else -1) == expected["tail"], id


# ---- the formulas against each other

counts = st.integers(0, 200)
sizes = st.integers(1, 50)
etas = st.integers(0, 8)


@given(etas, sizes, counts, counts, counts, counts)
def test_p1_is_areals_form_when_accepted_is_what_was_published_and_what_was_not(
    eta: int, b: int, version: int, unpublished: int, buffered: int, running: int
) -> None:
    accepted = version * b + unpublished + buffered
    room = capacity(eta, 10**9, b, version, accepted, running)
    assert room == outstanding_limit(eta, b) - (unpublished + buffered + running)


@given(etas, sizes, counts, counts, counts, st.integers(1, 200))
def test_p1_and_areals_form_part_by_what_was_dropped(
    eta: int, b: int, version: int, buffered: int, running: int, dropped: int
) -> None:
    """A cumulative ``accepted`` that a drop does not leave loses the dropped places for good."""
    accepted = version * b + buffered + dropped
    leak = outstanding_limit(eta, b) - (buffered + running) - capacity(eta, 10**9, b, version, accepted, running)
    assert leak == dropped


@given(etas, st.none() | sizes, sizes, counts, counts, counts)
def test_admitting_the_capacity_uses_it_up(
    eta: int, concurrency: int | None, b: int, version: int, accepted: int, running: int
) -> None:
    room = capacity(eta, concurrency, b, version, accepted, running)
    assert capacity(eta, concurrency, b, version, accepted, running + room) == 0
    assert running + room <= (b if concurrency is None else concurrency)
    assert accepted + running + room <= (eta + version + 1) * b
    assert running + room == (b if concurrency is None else concurrency) or accepted + running + room == (
        (eta + version + 1) * b
    )


@given(etas, sizes, counts, counts)
def test_recovery_leaves_the_room_of_a_run_that_never_stopped(eta: int, b: int, version: int, buffered: int) -> None:
    room = capacity(eta, 10**9, b, version, restored(version, b, buffered), 0)
    assert room == outstanding_limit(eta, b) - buffered


@given(etas, st.none() | sizes, sizes, counts, counts, counts)
def test_one_more_version_ahead_or_published_is_room_for_one_more_batch(
    eta: int, concurrency: int | None, b: int, version: int, accepted: int, running: int
) -> None:
    more = capacity(eta + 1, concurrency, b, version, accepted, running)
    assert more == capacity(eta, concurrency, b, version + 1, accepted, running)
    unlimited = capacity(eta + 1, 10**9, b, version, accepted, running)
    assert unlimited - capacity(eta, 10**9, b, version, accepted, running) == b


def test_age_counts_versions() -> None:
    assert age(3, 3) == 0
    assert age(3, 1) == 2


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 9)), min_size=1, max_size=5), st.integers(9, 20))
def test_a_groups_age_is_that_of_its_oldest_token(segments: list[tuple[int, int]], x: int) -> None:
    ledger = Ledger(Shape(), 0, [], {}, x=x)
    rollouts = {i: Rollout(i, 0, i, "scored", spans=[Span(v, n)]) for i, (v, n) in enumerate(segments)}
    ledger.rollouts.update(rollouts)
    size = len(segments)
    ledger.groups[0] = Group(0, 0, 0, 0, size, size, 0, [], "train", "accepted", [*rollouts])
    assert ledger.age(0) == age(x, min(v for v, _ in segments))
