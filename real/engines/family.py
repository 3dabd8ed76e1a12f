"""A process with all its descendants: bound to cores, counted, and ended to the last.

Each library makes processes of its own. All are descendants of the first, which is a child of this process; each is
killed by the kernel when its parent dies, so that a killed engine child takes all of them along.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import time
from pathlib import Path
from typing import Protocol

from ..child import PR_SET_PDEATHSIG
from ..processes import descendants

PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on orphaned descendants come to this process, to be reaped."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that started it ends."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def free_port() -> int:
    """A port on the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Leader(Protocol):
    """A child process of this one."""

    @property
    def pid(self) -> int:
        """Its id."""

    def wait(self) -> int:
        """Wait for its end, and reap it; its exit code."""


async def gone(pid: int) -> None:
    """Wait until this process has ended."""
    watch, ended = os.pidfd_open(pid), asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(watch, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(watch)
        os.close(watch)


class Family:
    """`process` and whatever it has started."""

    def __init__(self, process: Leader) -> None:
        self._process = process
        self._cores: set[int] = set()

    def pids(self) -> list[int]:
        """All its processes, parents first."""
        return descendants(self._process.pid)

    def stopped(self) -> list[int]:
        """Its processes that somebody has stopped (SIGSTOP)."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt":
                    found.append(pid)
        return found

    def follow(self) -> None:
        """Bind all its threads to this process's cores, if those have changed."""
        cores = os.sched_getaffinity(0)
        if cores == self._cores:
            return
        for pid in self.pids():
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    with contextlib.suppress(OSError):
                        os.sched_setaffinity(int(task.name), cores)
        self._cores = cores

    def cpu_ns(self) -> int:
        """CPU time of all its processes."""
        tick = 10**9 // os.sysconf("SC_CLK_TCK")
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                # The name, in parentheses, may hold anything; user and system time are fields 14 and 15.
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += (int(fields[11]) + int(fields[12])) * tick
        return total

    def rss(self) -> int:
        """Physical memory of all its processes; pages that they share count in each."""
        total = 0
        for pid in self.pids():
            with contextlib.suppress(OSError):
                total += int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return total

    def kill(self, patience_s: float = 5.0) -> None:
        """End every process by its id, and reap."""
        pids = self.pids()
        # Python's resource trackers end with the last process that they serve, and take what it left behind along.
        serving = [pid for pid in pids if not tracks(pid)]
        for pid in serving:
            end(pid)
        self._process.wait()
        left = set(pids[1:])
        deadline = time.monotonic() + patience_s
        while left := {pid for pid in left if not reaped(pid)}:
            if time.monotonic() > deadline:
                for pid in left:
                    end(pid)
                return
            time.sleep(0.01)


def end(pid: int) -> None:
    """Kill a process, if it lives."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def tracks(pid: int) -> bool:
    """Whether a process is a resource tracker of Python's multiprocessing."""
    try:
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def reaped(pid: int) -> bool:
    """Whether a descendant is gone; once its own parents are, it is reaped here."""
    try:
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    except ChildProcessError:
        return not Path(f"/proc/{pid}").exists()
