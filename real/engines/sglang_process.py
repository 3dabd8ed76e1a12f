"""One SGLang server: started, asked, and waited for.

SGLang makes several processes: HTTP and requests, scheduler and model, detokenizer, and Python's resource tracker.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from .family import Family, adopt_orphans, free_port, gone
from .http import HttpError, Silent, ask

SERVER = "rlsched.real.engines.sglang_server"
START_S = 300.0
"""Longest start. It takes a third of a minute on idle cores, and minutes on busy ones."""
PATIENCE_S = 60.0
"""Longest answer to anything but a request. None takes a second; a machine may be busy."""
SETTINGS = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    # Every token goes to the HTTP process at once: a request aborted in the queue gives back what is there.
    "SGLANG_FORCE_STREAM_INTERVAL": "1",
    # The last line of stderr is what is told of an engine that died.
    "PYTHONWARNINGS": "ignore",
}


class Server(Family):
    """A running server; all of it."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        super().__init__(process)
        self.port = port

    @classmethod
    async def start(cls, arguments: Sequence[str], environment: Mapping[str, str], threads: int) -> Server:
        """Start it with these arguments, and wait until it serves. It writes to this process's stderr."""
        adopt_orphans()
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
        except (OSError, HttpError, Silent):
            return False
        return True

    async def get(self, path: str) -> Any:
        """Ask it. Raises `Silent` if it doesn't answer."""
        return await ask(self.port, "GET", path, patience_s=PATIENCE_S)

    async def post(self, path: str, body: dict[str, Any], patience_s: float | None = PATIENCE_S) -> Any:
        """Tell it. Raises `Silent` if it doesn't answer in time; None: it may take for ever."""
        return await ask(self.port, "POST", path, body, patience_s)

    async def ended(self) -> int:
        """Wait for the end of its first process; its exit code."""
        await gone(self._process.pid)
        return self._process.wait()
