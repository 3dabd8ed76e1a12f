"""vLLM as an engine, by its server: a child process that starts vLLM's OpenAI server and drives it over HTTP.

Token ids go in and out by `/inference/v1/generate`; the controls are those of the server's development mode
(`VLLM_SERVER_DEV_MODE`), which a trainer needs.

Run as `PYTHON -m rlsched.real.engines.vllm_http --fd N --parent PID`, with the environment of `installs.RECIPES`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from typing import Any

from ..commands import Json
from .family import Family, adopt_orphans, free_port
from .hosted import main
from .http import HttpError, ask
from .vllm_arguments import SERVED
from .vllm_driver import Output, Port
from .vllm_hosted import VllmHosted

SERVER = "rlsched.real.engines.vllm_server"
START_S = 300.0
"""Longest start. It takes a third of a minute on idle cores, and minutes on busy ones."""


class HttpPort:
    """The server's routes."""

    family: Family

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._port = 0

    async def start(self, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        """Start vLLM with these arguments, and this in the engine core's environment."""
        adopt_orphans()
        self._port = free_port()
        command = [sys.executable, "-m", SERVER, *options(arguments), "--port", str(self._port)]
        settings = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": str(self._threads), **environment}
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sys.stderr, env=settings)
        self.family = Family(process)
        try:
            async with asyncio.timeout(START_S):
                while not await self._serves():
                    if process.poll() is not None:
                        raise RuntimeError(f"the vLLM server ended while starting: exit code {process.returncode}")
                    await asyncio.sleep(0.1)
        except BaseException:
            self.family.kill()
            raise

    async def _serves(self) -> bool:
        try:
            await ask(self._port, "GET", "/health")
        except (OSError, HttpError):
            return False
        return True

    async def _post(self, path: str, body: Json | None = None) -> Any:
        return await ask(self._port, "POST", path, body)

    async def generate(self, rid: str, tokens: list[int], sampling: Json) -> Output:
        """Generate, to the request's end."""
        body = {"request_id": rid, "token_ids": tokens, "sampling_params": sampling}
        return read(await self._post("/inference/v1/generate", body))

    async def abort(self, rids: list[str]) -> None:
        """End these requests."""
        await self._post("/abort_requests", {"request_ids": [SERVED + rid for rid in rids]})

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Pause generation."""
        await self._post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}")

    async def resume(self) -> None:
        """Resume generation."""
        await self._post("/resume")

    async def reset_prefix_cache(self, running: bool) -> bool:
        """Forget cached KV; `running`: preempt the requests that stand on it."""
        told = await self._post(f"/reset_prefix_cache?reset_running_requests={str(running).lower()}")
        return bool(told["success"])

    async def ask_worker(self, method: str, **arguments: Any) -> Any:
        """Call a method of the worker; its answer."""
        (answer,) = (await self._post("/collective_rpc", {"method": method, "kwargs": arguments}))["results"]
        return answer

    async def label(self, version: str) -> None:
        """Call the weights this."""
        await self._post("/update_weight_version", {"new_version": version})


def read(answer: Json) -> Output:
    """The server's answer to a request."""
    (choice,) = answer["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    labels = choice["weight_versions"]
    told = None if labels is None else [(int(s["version"]), s["end"] - s["start"]) for s in labels]
    details = answer["usage"]["prompt_tokens_details"] or {}
    return Output(choice["token_ids"], logprobs, choice["finish_reason"], told, details.get("cached_tokens"))


def options(arguments: dict[str, Any]) -> list[str]:
    """The server's command line."""
    told = [
        "--host",
        "127.0.0.1",
        "--uvicorn-log-level",
        "error",
        "--enable-prompt-tokens-details",
        "--enable-scale-out",
    ]
    for field, value in arguments.items():
        name = field.replace("_", "-")
        match value:
            case True:
                told.append(f"--{name}")
            case False:
                told.append(f"--no-{name}")
            case _:
                told += [f"--{name}", str(value)]
    return told


class VllmServerEngine(VllmHosted):
    """vLLM's server."""

    kind = "vllm-server"

    def _port_to_vllm(self) -> Port:
        return HttpPort(self._config.threads)


if __name__ == "__main__":
    main(VllmServerEngine)
