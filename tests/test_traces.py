"""What real runs recorded: every trace in ``traces/`` is whole, checks clean, and replays command for command."""

from pathlib import Path

import pytest

from rlsched.checker import check
from rlsched.commands import Abort, Generate
from rlsched.history import Reader
from rlsched.replay import replay

TRACES = sorted((Path(__file__).parent.parent / "traces").glob("*.jsonl.zst"))


def test_there_are_traces_of_both_presets_on_every_engine() -> None:
    heads = [Reader(path).manifest for path in TRACES]
    policies = ("verl-hybrid", "areal-async", "areal-async,admit.eta=1")
    found = {(head.policy.name, engine) for head in heads for engine in head.versions}
    assert {(p, e) for p in policies for e in ("transformers", "vllm", "sglang")} <= found


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.name)
def test_a_trace_is_clean_and_replays(path: Path) -> None:
    reader = Reader(path)
    assert reader.manifest.world == "real"
    report = check(reader)
    assert report.ok, report.violations[:1]
    assert not report.open
    assert not report.failed
    again = replay(Reader(path))
    assert again.divergence is None
    assert again.facts + again.answers == report.events
    ahead = "eta=1" in reader.manifest.policy.name
    events = list(Reader(path).events())
    called = {r for e in events if isinstance(e, Abort) and e.fate == "resume" for r in e.rollouts}
    resumed = {w.rollout for e in events if isinstance(e, Generate) for w in e.work if w.have}
    assert bool(called & resumed) == ahead
