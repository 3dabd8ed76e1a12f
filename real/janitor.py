"""Clears up after a run whose own process was killed.

A rig's folder holds all that the run leaves on disk, and for each child a file that says what else it holds: its
session, and named shared memory. A janitor is a process that waits until its parent is gone, and ends the sessions,
removes the shared memory, and then the folder. After a run that ended by itself it finds no folder.

Run as `python -m rlsched.real.janitor FOLDER`, with a pipe as standard input.
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import time
import weakref
from pathlib import Path

from . import processes

HELD = ".held"
"""Suffix of the file that says what a child holds: the number of its session, then paths, one a line."""


class Janitor:
    """The parent's hold on a janitor of ``folder``."""

    def __init__(self, folder: Path) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(folder)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # whoever kills a whole process group doesn't mean it
        )
        self.pid = process.pid
        self.close = weakref.finalize(self, _dismiss, process)
        """Let it go, and wait for it."""


def _dismiss(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    process.stdin.close()
    process.wait()


def clear(folder: Path, patience_s: float = 10.0) -> None:
    """End and remove all that the run of ``folder`` has left."""
    for file in folder.glob(f"*{HELD}"):
        session, *paths = file.read_text().splitlines() or ["0"]
        if int(session):
            processes.end(int(session))
        for path in paths:
            Path(path).unlink(missing_ok=True)
    deadline = time.monotonic() + patience_s
    while folder.exists() and time.monotonic() < deadline:
        # Who was killed a moment ago may still have put a file there.
        shutil.rmtree(folder, ignore_errors=True)
        time.sleep(0.01)


def main() -> None:
    """Wait for the parent's end."""
    with contextlib.suppress(KeyboardInterrupt):
        sys.stdin.buffer.read()
    clear(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
