"""vLLM as an engine, by its `AsyncLLM`: the front-end in this child process, the engine core in one of its own.

Run as `PYTHON -m rlsched.real.engines.vllm_async --fd N --parent PID`, with the environment of `installs.RECIPES`.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from ..commands import Json
from .family import Family, adopt_orphans
from .hosted import main
from .vllm_driver import Output, Port
from .vllm_hosted import VllmHosted


class Core:
    """The engine core's process."""

    def __init__(self, process: Any) -> None:
        self._process = process
        self.pid: int = process.pid

    def wait(self) -> int:
        """Wait for its end, and reap it; its exit code."""
        while self._process.exitcode is None:
            self._process.join()
        return int(self._process.exitcode)


class AsyncPort:
    """`AsyncLLM`'s methods."""

    family: Family

    def __init__(self, threads: int) -> None:
        self._threads = threads
        self._vllm: AsyncLLM

    async def start(self, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        """Start vLLM with these arguments, and this in the engine core's environment."""
        adopt_orphans()
        torch.set_num_threads(self._threads)  # the core is forked from here
        os.environ.update(environment)
        self._vllm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        (core,) = self._vllm.engine_core.resources.engine_manager.processes
        self.family = Family(Core(core))

    async def generate(self, rid: str, tokens: list[int], sampling: Json) -> Output:
        """Generate, to the request's end."""
        wanted = SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        (output,) = [o async for o in self._vllm.generate({"prompt_token_ids": tokens}, wanted, rid)]
        return read(output)

    async def abort(self, rids: list[str]) -> None:
        """End these requests."""
        await self._vllm.abort(rids)

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Pause generation."""
        await self._vllm.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        """Resume generation."""
        await self._vllm.resume_generation()

    async def reset_prefix_cache(self, running: bool) -> bool:
        """Forget cached KV; `running`: preempt the requests that stand on it."""
        return bool(await self._vllm.reset_prefix_cache(reset_running_requests=running))

    async def ask_worker(self, method: str, **arguments: Any) -> Any:
        """Call a method of the worker; its answer."""
        (answer,) = await self._vllm.collective_rpc(method, kwargs=arguments)
        return answer

    async def label(self, version: str) -> None:
        """Call the weights this."""
        await self._vllm.update_weight_version(version)


def read(output: RequestOutput) -> Output:
    """vLLM's last answer to a request."""
    (part,) = output.outputs
    tokens = list(part.token_ids)
    logprobs = [each[token].logprob for token, each in zip(tokens, part.logprobs or (), strict=True)]
    labels = part.weight_versions
    told = None if labels is None else [(int(s.version), s.end - s.start) for s in labels]
    return Output(tokens, logprobs, str(part.finish_reason), told, output.num_cached_tokens)


class VllmAsyncEngine(VllmHosted):
    """vLLM's `AsyncLLM`."""

    kind = "vllm-async"

    def _port_to_vllm(self) -> Port:
        return AsyncPort(self._config.threads)


if __name__ == "__main__":
    main(VllmAsyncEngine)
