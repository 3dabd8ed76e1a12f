"""Whole scheduled runs on every engine but the embedded one, on canary weights: both presets, at η = 1 with every fate
of the requests that an update meets. Each token is compared with its segment and with what was installed.

A minute and a half for vLLM and SGLang on two idle cores, most of it the start of servers; the other two ways to run
vLLM are nightly.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlsched.checker import check
from rlsched.commands import Abort, Flush, Generate
from rlsched.facts import Installed, Segment
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.real.canary_run import audit, canary, logged
from rlsched.real.installs import engine as look
from rlsched.real.job import perform
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.replay import replay
from rlsched.shape import Shape
from rlsched.workload import Length, Workload

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]  # needs `make engines`

AHEAD = "areal-async,admit.eta=1,admit.C=6"
POLICIES = (
    "verl-hybrid",
    "areal-async",
    AHEAD,
    f"{AHEAD},publish.fate=restart",
    f"{AHEAD},publish.fate=drain",
    f"{AHEAD},publish.fate=retract",
    f"{AHEAD},publish.fate=keep",
)
KINDS = ("vllm", "sglang", *(pytest.param(kind, marks=pytest.mark.nightly) for kind in ("vllm-async", "vllm-server")))


class Bench:
    """One rig and the loop that it lives in."""

    def __init__(self, kind: str) -> None:
        setup = Setup(
            engine_kind=kind,
            shape=Shape(b=2, samples=2, steps=4, budget=120),
            workload=Workload(prompt=Length(mean=4.0), output=Length(kind="lognormal", mean=60.0, sigma=0.8)),
        )
        self.kind = kind
        self.runner = asyncio.Runner()
        self.rig = self.runner.run(Rig.start(canary(setup), 1))


@pytest.fixture(scope="module", params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    found = look(request.param)
    if not found.ok:
        say = pytest.fail if os.environ.get("RLSCHED_REQUIRE_ENGINES") == "1" else pytest.skip
        say(f"engine {request.param}: {found.why}")
    made = Bench(request.param)
    yield made
    made.runner.run(made.rig.close())
    made.runner.close()


@pytest.mark.parametrize("policy", POLICIES)
def test_every_token_is_of_its_segments_version(bench: Bench, tmp_path: Path, policy: str) -> None:
    path = tmp_path / "run.jsonl"
    head, end = bench.runner.run(perform(bench.rig, parse(policy), 3, path))
    assert end.ok, end.why
    report = check(Reader(path))
    assert report.ok, report.violations[:2]
    assert replay(Reader(path)).divergence is None
    assert head.versions[bench.kind] == look(bench.kind).version
    assert head.labels["sleep_frees"] == "nothing"  # a CPU's sleep, and it doesn't pretend
    events = list(Reader(path).events())
    assert [e.version for e in events if isinstance(e, Installed)] == [0, 1, 2, 3, 4]
    found = audit(events, logged(path))
    assert found.good, (found.labels, found.installs)
    segments = [e for e in events if isinstance(e, Segment)]
    assert not any(s.end == "error" for s in segments)
    called = {r for e in events if isinstance(e, Abort) and e.fate != "cancel" for r in e.rollouts}
    resumed = {w.rollout for e in events if isinstance(e, Generate) for w in e.work if w.have}
    lived = {s.rollout for s in segments if s.end == "install"}
    fate = parse(policy).publish.fate
    if AHEAD not in policy or fate == "drain":
        assert not called and not lived and not found.mixed
    elif fate == "resume":
        assert called & resumed and found.mixed and not lived
    elif fate == "restart":
        assert called and not resumed and not found.mixed and not lived
    else:
        assert lived and found.mixed and not called
        assert any(isinstance(e, Flush) and e.recompute for e in events) == (fate == "retract")
        older = {s.rollout for s in segments if s.kv_from < s.version}
        assert bool(older) == (fate == "keep") and older <= lived
