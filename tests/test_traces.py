"""What real runs recorded: every trace in ``traces/`` is whole, checks clean, and replays command for command."""

from pathlib import Path

import pytest

from rlsched.checker import check
from rlsched.history import Reader
from rlsched.replay import replay

TRACES = sorted((Path(__file__).parent.parent / "traces").glob("*.jsonl.zst"))


def test_there_are_traces_of_both_presets() -> None:
    names = {Reader(path).manifest.policy.name for path in TRACES}
    assert {"verl-hybrid", "areal-async", "areal-async,admit.eta=1"} <= names


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
