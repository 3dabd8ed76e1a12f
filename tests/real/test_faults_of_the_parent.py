"""The run's own process is ended in mid-generation: no process of it, shared memory or folder is left.

Measured on busy cores: two minutes and a half on the embedded engine. The others are nightly.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rlsched.checker import check
from rlsched.history import Reader
from rlsched.real import installs, processes

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]

#: More versions than it will make.
JOB = """
engine_kind = "{kind}"
shape = {{ b = 2, samples = 2, steps = 10000, budget = 64 }}
engine = {{ pace = {{ step = {{ a = 5000000 }} }} }}
"""


def eventually(condition: Callable[[], object], timeout_s: float) -> bool:
    """The timeout only turns a hang into a failure."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


nightly = pytest.mark.nightly
ENDS = [
    ("transformers", signal.SIGKILL),
    ("transformers", signal.SIGTERM),
    ("transformers", signal.SIGINT),
    pytest.param("vllm", signal.SIGKILL, marks=nightly),
    pytest.param("sglang", signal.SIGKILL, marks=nightly),
    pytest.param("sglang", signal.SIGINT, marks=nightly),
]


@pytest.mark.parametrize(("kind", "what"), ENDS)
def test_nothing_is_left(tmp_path: Path, kind: str, what: signal.Signals) -> None:
    found = installs.engine(kind)
    if not found.ok and not os.environ.get("RLSCHED_REQUIRE_ENGINES"):
        pytest.skip(f"engine {kind}: {found.why}")
    folders = tmp_path / "t"
    folders.mkdir()
    config, history = tmp_path / "job.toml", tmp_path / "history.jsonl"
    config.write_text(JOB.format(kind=kind))
    policy = "areal-async,place.engines=2,admit.eta=1"
    command = [
        sys.executable,
        "-m",
        "rlsched",
        "run",
        policy,
        "--engine",
        kind,
        "--config",
        config,
        "--output",
        history,
    ]
    environment = {**os.environ, "TMPDIR": str(folders)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL, start_new_session=True) as parent:
        try:
            assert eventually(lambda: history.exists() and b'"ev":"publish"' in history.read_bytes(), 900.0)
            pids = processes.descendants(parent.pid)[1:]
            segments = processes.segments(parent.pid, set())
            # Two engines, the trainer and the janitor; SGLang has a server of several more for each.
            assert len(pids) >= (10 if kind == "sglang" else 4)
            assert bool(segments) == (kind == "sglang")
            assert list(folders.glob("rlsched-*"))
            parent.send_signal(what)
            parent.wait(120.0)
        finally:
            parent.kill()
    assert eventually(lambda: not [pid for pid in pids if Path(f"/proc/{pid}").exists()], 120.0)
    assert not [path for path in segments if path.exists()]
    assert not list(folders.glob("rlsched-*"))
    report = check(Reader(history, salvage=True))
    assert report.counts == {}
    assert (report.failed == "interrupted") == (what == signal.SIGINT)
