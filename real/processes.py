"""The processes of a session, and what they hold that outlives them.

Each child of a run leads a session of its own, and all that it starts belongs to it, orphans too. The number of a
session can't come again while its first process isn't reaped: so reap that one last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

SHM = Path("/dev/shm")
"""Where named shared memory and semaphores are files."""


def _stat(pid: int) -> tuple[str, int] | None:
    """State and session of a process."""
    try:
        # The name, in parentheses, may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return fields[0], int(fields[3])


def members(session: int) -> dict[int, str]:
    """The processes of a session by id, with their states ("R", "S", "T", …). Zombies are none."""
    found: dict[int, str] = {}
    for entry in os.listdir("/proc"):  # noqa: PTH208, a path for each process is slow
        if entry.isdigit() and (told := _stat(int(entry))) is not None and told[1] == session and told[0] != "Z":
            found[int(entry)] = told[0]
    return found


def descendants(pid: int) -> list[int]:
    """A process and all that it has started and that still have a parent, parents first. Cheaper than `members`."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(OSError):
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += [int(child) for child in (task / "children").read_text().split()]
    return found


def send(session: int, what: signal.Signals) -> None:
    """Send a signal to every process of a session."""
    for pid in members(session):
        with contextlib.suppress(ProcessLookupError):
            handle = os.pidfd_open(pid)
            try:
                # The id might be another's by now; it can't change while the handle is open.
                if (told := _stat(pid)) is not None and told[1] == session:
                    signal.pidfd_send_signal(handle, what)
            finally:
                os.close(handle)


def stopped(pid: int) -> set[tuple[int, int]]:
    """Which of a process and those it has started stand still by a signal (under a debugger they don't): ids, each
    with a count that changes whenever it is let go on, so that one which is only slowed down can be told from it."""
    found: set[tuple[int, int]] = set()
    for one in descendants(pid):
        with contextlib.suppress(OSError):
            told = dict(line.split(":\t", 1) for line in Path(f"/proc/{one}/status").read_text().splitlines())
            if told["State"].startswith("T"):
                found.add((one, int(told["voluntary_ctxt_switches"]) + int(told["nonvoluntary_ctxt_switches"])))
    return found


def end(session: int, patience_s: float = 10.0) -> bool:
    """Kill every process of a session and wait until none is left; whether that came to pass."""
    deadline = time.monotonic() + patience_s
    while members(session):
        send(session, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def named_segments() -> set[Path]:
    """All files of shared memory that have a name."""
    try:
        return {SHM / name for name in os.listdir(SHM)}  # noqa: PTH208
    except FileNotFoundError:
        return set()


def segments(pid: int, before: set[Path]) -> set[Path]:
    """Named shared memory that a process and those it has started have mapped, except what was there `before`."""
    fresh = named_segments() - before
    if not fresh:
        return set()
    mapped: set[int] = set()
    for one in descendants(pid):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{one}/maps").read_text().splitlines():
                # By inode: a semaphore is mapped under the name that it had before its own.
                if f" {SHM}/" in line:
                    mapped.add(int(line.split(None, 5)[4]))
    found: set[Path] = set()
    for path in fresh:
        with contextlib.suppress(OSError):
            if path.stat().st_ino in mapped:
                found.add(path)
    return found
