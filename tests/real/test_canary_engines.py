"""What canary tokens say on vLLM and SGLang: every pause mode with and without a flush, and every seeded fault."""

from __future__ import annotations

import asyncio
import os

import pytest

from rlsched.real.canary import Reading
from rlsched.real.canary_faults import AWAKE, CANNOT, FAULTS, TRANSPORTS, Cell
from rlsched.real.canary_matrix import CARELESS, Matrix, matrix
from rlsched.real.installs import engine as look

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]  # needs `make engines`


KINDS = ("vllm", "sglang", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("vllm-async", "vllm-server")))


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """An engine that is installed; skips, or fails where engines are required, if it isn't."""
    found = look(request.param)
    if not found.ok:
        say = pytest.fail if os.environ.get("RLSCHED_REQUIRE_ENGINES") == "1" else pytest.skip
        say(f"engine {request.param}: {found.why}")
    return request.param


def some(cell: Cell) -> bool:
    """Every right handling of the engine itself by one transport, and each fault once."""
    if cell.transport not in ("", TRANSPORTS[0]):
        return False
    return not cell.bare if cell.fault == "none" else cell.handling == FAULTS[cell.fault].handled[0]


@pytest.fixture(scope="module")
def found(kind) -> Matrix:
    return asyncio.run(matrix(kind, some))


def test_every_pause_mode_with_and_without_a_flush_decodes_what_it_claims(found):
    right = [c for c in found.cells if c.fault == "none"]
    done = {c.handling for c in right}
    assert {h for h in AWAKE if h.pause in found.pause_modes} <= done
    assert {(h.pause, h.flush) for h in done} == {
        (mode, flush) for mode in found.pause_modes for flush in (True, False)
    }
    for c in right:
        assert c.good and not any(a.mismatches for a in c.answers), c
        versions = [run.said.version for a in c.answers for run in a.said]
        assert versions == sorted(versions) and set(versions) == {c.old, c.old + 1}, c
    for c in right:
        if c.handling.running == "hold":
            kept = c.handling.pause == "keep" and not c.handling.flush
            last = c.answers[0].said[-1].said
            assert last == (Reading(c.old + 1, c.old, ("kv",)) if kept else Reading(c.old + 1, c.old + 1))


def test_each_seeded_fault_is_caught_in_the_tokens(found):
    wrong = {c.fault: c for c in found.cells if c.fault != "none"}
    assert wrong.keys() == FAULTS.keys() - found.left_out.keys()
    for fault, c in wrong.items():
        assert c.good and c.shown, c
        assert c.guard.partition(":")[0] == FAULTS[fault].guard
    # What is left out is no more than what this machine and this library can't do.
    twinless = set() if found.engine in CARELESS else {fault for fault, seeded in FAULTS.items() if seeded.bare}
    assert {what for what in found.left_out if what in FAULTS} <= {"no update"} | twinless
    modes = {f"{fault}, pause {mode}" for _, fault, mode in CANNOT}
    assert {what for what in found.left_out if "," in what} <= modes


def test_a_library_that_was_told_the_wrong_version_says_it(found):
    """Where it labels its tokens: the label follows what it was told, and the tokens what it holds."""
    (phantom,) = (c for c in found.cells if c.fault == "phantom")
    fresh = next(a for a in phantom.answers if a.request == "fresh")
    assert {run.said for run in fresh.said} == {Reading(phantom.old, phantom.old)}
    if fresh.own is not None:
        assert phantom.own == "wrong" and not fresh.own.right
        assert fresh.own.says == [(phantom.old + 1, fresh.own.truth[0][1])]


@pytest.mark.nightly
def test_the_whole_matrix(kind):
    found = asyncio.run(matrix(kind))
    assert [c for c in found.cells if not c.good] == [] and found.good
