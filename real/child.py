"""Child processes: started by a named interpreter, bound to CPU cores, watched, and always reaped.

The parent's half is `Child`; a child's own first act is `adopt`. A child can't outlive its parent: it sees its socket
close, and should it be too busy to look, the kernel kills it (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


class ChildDied(Exception):  # noqa: N818
    """A child process is gone. Raised by every pending and every later call to it."""

    def __init__(self, name: str, pid: int, status: str, last_line: str) -> None:
        super().__init__(f"{name} (pid {pid}) died: {status}; last stderr line: {last_line or '(none)'}")
        self.name = name
        self.pid = pid
        self.status = status  # "exit code 3" or "signal SIGKILL"
        self.last_line = last_line


class Child:
    """A child process and the parent's end of the socket to it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: socket.socket, stderr: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.socket = connection
        self.stderr = stderr
        self._process = process
        # Also runs at interpreter exit, so that a parent which forgets to close leaves nothing behind.
        self._kill = weakref.finalize(self, _kill, process, connection)

    @classmethod
    def start(
        cls,
        name: str,
        module: str,
        run_dir: Path,
        *,
        interpreter: str = sys.executable,
        cpus: Iterable[int] | None = None,
        environment: Mapping[str, str] | None = None,
        arguments: Sequence[str] = (),
    ) -> Child:
        """Start `interpreter -m module`. Its stderr goes to a file in `run_dir`, which must exist.

        Call it from a thread that lives as long as the child should: PR_SET_PDEATHSIG follows the thread.
        """
        ours, theirs = socket.socketpair()
        stderr = run_dir / f"{name}.stderr"
        command = [interpreter, "-m", module, "--fd", str(theirs.fileno()), "--parent", str(os.getpid()), *arguments]
        # Loopback: gloo would otherwise ask a name service for this host's address.
        settings = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "HF_HUB_OFFLINE": "1", **(environment or {})}
        with theirs, stderr.open("wb") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=[theirs.fileno()],
                env=settings,
                start_new_session=True,  # Ctrl-C is for the parent, which then closes its children in order
            )
        child = cls(name, process, ours, stderr)
        if cpus is not None:
            child.set_cpus(cpus)
        return child

    def set_cpus(self, cpus: Iterable[int]) -> None:
        """Bind all threads of the child to these cores, now. Threads that it starts later inherit the binding."""
        cores = set(cpus)
        bound: set[int] = set()
        # A thread may be born of one not yet bound while we go through the list: go on until a pass finds nothing new.
        while fresh := self._threads() - bound:
            for thread in fresh:
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread, cores)
            bound |= fresh

    def _threads(self) -> set[int]:
        try:
            return {int(task.name) for task in Path(f"/proc/{self.pid}/task").iterdir()}
        except FileNotFoundError:
            return set()

    @property
    def alive(self) -> bool:
        """Whether the process runs; one that has ended is reaped by asking."""
        return self._process.poll() is None

    def death(self) -> ChildDied:
        """What to raise about an ended child."""
        code = self._process.poll()
        if code is None:
            status = "connection lost"
        elif code < 0:
            status = f"signal {signal.Signals(-code).name}"
        else:
            status = f"exit code {code}"
        return ChildDied(self.name, self.pid, status, self.last_line())

    def last_line(self, window: int = 4096) -> str:
        """The last non-empty line of its stderr."""
        with self.stderr.open("rb") as errors:
            errors.seek(max(0, os.fstat(errors.fileno()).st_size - window))
            lines = errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")

    async def wait(self, timeout: float) -> bool:
        """Wait for the end of the process; False if it still runs after `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self.alive:
                    await asyncio.sleep(0.01)
        return not self.alive

    async def close(self, timeout: float = 5.0) -> None:
        """End the child: close the socket, and if that doesn't do within `timeout` seconds, SIGTERM, then SIGKILL."""
        # shutdown, not close: an asyncio transport may own the same socket.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        if not await self.wait(timeout):
            self._process.terminate()
            if not await self.wait(1.0):
                self._process.kill()
                await self.wait(10.0)
        self._kill()

    def kill(self) -> None:
        """SIGKILL it, now; for tests of what happens then."""
        self._process.kill()


def _kill(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    if process.poll() is None:
        process.kill()
    process.wait()


def adopt(arguments: Sequence[str] | None = None) -> socket.socket:
    """A child's first act: tie its life to the parent's and return its end of the socket."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--parent", type=int, required=True)
    options = parser.parse_args(arguments)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before the line above.
    if os.getppid() != options.parent:
        sys.exit("the parent is gone")
    return socket.socket(fileno=options.fd)
