"""The processes of one SGLang server: started, bound to the engine child's cores, counted, and ended to the last.

SGLang makes several processes: HTTP and requests, scheduler and model, detokenizer, and Python's resource tracker. All
are descendants of the first, which is a child of this process; each is killed by the kernel when its parent dies, so
that a killed engine child takes the whole server along.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .sglang_http import HttpError, ask

PR_SET_CHILD_SUBREAPER = 36
SERVER = "rlsched.real.engines.sglang_server"
START_S = 300.0
"""Longest start. It takes a third of a minute on idle cores, and minutes on busy ones."""
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # Every token goes to the HTTP process at once: a request aborted in the queue gives back what is there.
    "SGLANG_FORCE_STREAM_INTERVAL": "1",
    # The last line of stderr is what is told of an engine that died.
    "PYTHONWARNINGS": "ignore",
}


class Server:
    """A running server; all of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.port = port
        self._process = process
        self._cores: set[int] = set()

    @classmethod
    async def start(cls, arguments: Sequence[str], environment: Mapping[str, str], threads: int) -> Server:
        """Start it with these arguments, and wait until it serves. It writes to this process's stderr."""
        # Orphans of the server come to this process, to be reaped.
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1)
        port = free_port()
        command = [sys.executable, "-m", SERVER, *arguments, "--host", "127.0.0.1", "--port", str(port)]
        settings = {**os.environ, **SETTINGS, "OMP_NUM_THREADS": str(threads), **environment}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=settings)
        server = cls(process, port)
        try:
            async with asyncio.timeout(START_S):
                while not await server._serves():
                    if process.poll() is not None:
                        raise RuntimeError(f"the SGLang server ended while starting: exit code {process.returncode}")
                    await asyncio.sleep(0.1)
        except BaseException:
            server.kill()
            raise
        return server

    async def _serves(self) -> bool:
        try:
            await self.get("/model_info")
        except (OSError, HttpError):
            return False
        return True

    async def get(self, path: str) -> Any:
        """Ask it."""
        return await ask(self.port, "GET", path)

    async def post(self, path: str, body: dict[str, Any]) -> Any:
        """Tell it."""
        return await ask(self.port, "POST", path, body)

    async def ended(self) -> int:
        """Wait for the end of its first process; its exit code."""
        watch, ended = os.pidfd_open(self._process.pid), asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(watch, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(watch)
            os.close(watch)
        return self._process.wait()

    # ------------------------------------------------------------ its processes

    def pids(self) -> list[int]:
        """All its processes, parents first."""
        found = [self._process.pid]
        for pid in found:
            with contextlib.suppress(OSError):
                for task in Path(f"/proc/{pid}/task").iterdir():
                    found += [int(child) for child in (task / "children").read_text().split()]
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
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.wait()
        deadline = time.monotonic() + patience_s
        with contextlib.suppress(ChildProcessError):
            while time.monotonic() < deadline:
                if os.waitpid(-1, os.WNOHANG) == (0, 0):
                    time.sleep(0.01)


def free_port() -> int:
    """A port on the loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
