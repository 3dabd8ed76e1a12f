"""Child processes: started by a named interpreter, bound to CPU cores, watched, and always reaped.

The parent's half is `Child`; a child's own first act is `adopt`. A child can't outlive its parent: it sees its socket
close, and should it be too busy to look, the kernel kills it (PR_SET_PDEATHSIG). With a child ends all that it has
started, and the named shared memory that they held is removed; what a killed parent can't remove, its `janitor` does.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import getpass
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rlsched.errors import WorldError

from . import processes
from .janitor import HELD

PR_SET_PDEATHSIG = 1


class ChildDied(WorldError):  # noqa: N818
    """A child process is gone. Raised by every pending and every later call to it."""

    def __init__(self, name: str, pid: int, status: str, last_line: str) -> None:
        super().__init__(f"{name} (pid {pid}) died: {status}; last stderr line: {last_line or '(none)'}")
        self.name = name
        self.pid = pid
        self.status = status  # "exit code 3", "signal SIGKILL", or what it was ended for
        self.last_line = last_line


class Child:
    """A child process and the parent's end of the socket to it."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], connection: socket.socket, stderr: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.socket = connection
        self.stderr = stderr
        self._process = process
        self._condemned = ""
        self._before = processes.named_segments()
        self._held = Held(stderr.with_suffix(HELD), process.pid)
        # These also run at interpreter exit, so that a parent which forgets to close leaves nothing behind.
        self._hang_up = weakref.finalize(self, connection.close)
        self._reap = weakref.finalize(self, _reap, process, self._held)
        self._reaping = threading.Lock()

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
        settings = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": "lo",  # gloo would otherwise ask a name service for this host's address
            "HF_HUB_OFFLINE": "1",
            # What libraries leave in the folder for temporary files goes with the run; compiled code is for all runs.
            "TMPDIR": str(run_dir),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", _compiled()),
            **(environment or {}),
        }
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
        """Whether the process runs."""
        # It isn't reaped by asking: as long as it isn't, its number can't be another's.
        options = os.WEXITED | os.WNOHANG | os.WNOWAIT
        try:
            return self._process.returncode is None and os.waitid(os.P_PID, self.pid, options) is None
        except ChildProcessError:  # reaped by another thread, which is about to say so
            return False

    @property
    def stopped(self) -> set[tuple[int, int]]:
        """What of it was stopped by a signal; see `processes.stopped`."""
        return processes.stopped(self.pid) if self._process.returncode is None else set()

    def signal(self, what: signal.Signals) -> None:
        """Send a signal to it and to all that it has started."""
        if self._process.returncode is None:
            processes.send(self.pid, what)

    def look(self) -> None:
        """Note the named shared memory that it holds, so that it can be removed after it."""
        if self._process.returncode is None:
            self._held.note(processes.segments(self.pid, self._before))

    def condemn(self, why: str) -> None:
        """Kill it and all that it has started, for `why`, which is what will be told of its death."""
        if self.alive:
            self._condemned = self._condemned or why
            self.signal(signal.SIGKILL)

    def death(self) -> ChildDied:
        """What to raise about an ended child. Nothing of it is left afterwards; that may take a moment."""
        patience = time.monotonic() + 0.5  # a socket is closed before the process has ended
        while (lost := self.alive) and time.monotonic() < patience:
            time.sleep(0.005)
        self.reap()
        code = self._process.returncode
        if self._condemned:
            status = self._condemned
        elif lost:
            status = "connection lost"
        elif code < 0:
            status = f"signal {signal.Signals(-code).name}"
        else:
            status = f"exit code {code}"
        return ChildDied(self.name, self.pid, status, self.last_line())

    def reap(self) -> None:
        """Kill what is left of it, wait for its end, and remove what it held."""
        with self._reaping:
            self._reap()

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
        self.look()
        # shutdown, not close: an asyncio transport may own the same socket, and closes it.
        with contextlib.suppress(OSError):
            self.socket.shutdown(socket.SHUT_RDWR)
        # One that stands still can't obey.
        if not self.stopped and not await self.wait(timeout):
            self._process.terminate()
            await self.wait(1.0)
        await asyncio.to_thread(self.reap)

    def kill(self) -> None:
        """SIGKILL the child alone, now; for tests of what happens then."""
        self._process.kill()


class Held:
    """What a child holds that outlives it, in memory and in a file for the janitor."""

    def __init__(self, file: Path, session: int) -> None:
        self._file = file
        self._segments: set[Path] = set()
        file.write_text(f"{session}\n")

    def note(self, segments: set[Path]) -> None:
        """It holds these, too."""
        fresh = segments - self._segments
        self._segments |= fresh
        if fresh:
            with self._file.open("a") as file:
                file.writelines(f"{path}\n" for path in sorted(fresh))

    def remove(self) -> None:
        """Remove it all."""
        for path in (*self._segments, self._file):
            path.unlink(missing_ok=True)


def _reap(process: subprocess.Popen[bytes], held: Held) -> None:
    processes.end(process.pid)
    process.wait()
    held.remove()


def _compiled() -> str:
    """Where torch keeps what it has compiled, unless told otherwise."""
    return str(Path(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}"))


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
