"""The seam into vLLM: requests in, steps, ended requests out, and new weights between two steps.

Used of vLLM 0.32, unchanged: `LLMEngine` (`add_request`, `abort_request`, `step`, `reset_prefix_cache`, `sleep`,
`wake_up`), its engine core's `collective_rpc("reload_weights")` and `set_weight_version`, and the `scheduler_cls`
plug. Below that, two things are read: which requests the scheduler runs, and how far a scheduled one is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
import torch
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from ..config import EngineConfig
from .server import Output, Work

CPU_PAGE = 32
"""vLLM's attention on CPU takes pages of a multiple of this many tokens."""
TAGS = {"weights": "weights", "kv": "kv_cache"}
"""What vLLM calls the parts that sleep."""


class TellingScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, which tells what each step will compute."""

    begun: Callable[[SchedulerOutput], None] | None = None

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan the next step."""
        planned = super().schedule(*args, **kwargs)
        if self.begun is not None and planned.total_num_scheduled_tokens:
            self.begun(planned)
        return planned


class Live(msgspec.Struct):
    """A request inside vLLM and what it has generated."""

    id: str  # vLLM's own, the rollout's with a random tail
    tokens: list[int] = []
    logprobs: list[float] = []


class VllmBatcher:
    """An `LLMEngine` in this thread. `begun` is called with what a step will compute, when that is known."""

    def __init__(self, config: EngineConfig, checkpoint: str, begun: Callable[[Work], None]) -> None:
        self.page_size = -(-config.page_size // CPU_PAGE) * CPU_PAGE if current_platform.is_cpu() else config.page_size
        pages = config.kv_blocks * config.page_size // self.page_size
        self.kv_tokens = pages * self.page_size
        model = config.model
        width = getattr(torch, model.dtype).itemsize
        page_bytes = self.page_size * model.layers * 2 * model.kv_heads * model.head_dim * width
        self._engine = LLMEngine.from_engine_args(
            EngineArgs(
                model=checkpoint,
                skip_tokenizer_init=True,
                generation_config="vllm",  # sampling is what a request says, nothing from the checkpoint
                dtype=model.dtype,
                max_model_len=min(model.max_positions, self.kv_tokens),
                max_num_seqs=config.max_requests,
                max_num_batched_tokens=config.max_batch_tokens,
                block_size=self.page_size,
                num_gpu_blocks_override=pages + 1,  # one page is vLLM's own
                kv_cache_memory_bytes=(pages + 1) * page_bytes,
                logprobs_mode="processed_logprobs",  # after temperature
                seed=config.seed,
                enforce_eager=True,
                enable_sleep_mode=not current_platform.is_cpu(),
                async_scheduling=False,
                distributed_executor_backend="uni",
                disable_log_stats=True,
                scheduler_cls=TellingScheduler,
            )
        )
        self._core = self._engine.engine_core
        self._scheduler: Any = self._core.engine_core.scheduler
        self._temperature = config.temperature
        self._eos = config.eos
        self._salt = 0
        self._live: dict[str, Live] = {}
        self._names: dict[str, str] = {}  # rollout by vLLM's own id
        self._ended: list[Output] = []
        self._warm()
        self._scheduler.begun = lambda planned: begun(self._work(planned))

    def _warm(self) -> None:
        """Make the steps that vLLM takes long over: its first ones, of one request and of some."""
        for n in (1, 4):
            for i in range(n):
                self.add(f"warm-{i}", [0] * 4, 4, True)
            while self._live:
                self.step()
        self._ended.clear()
        self.forget()

    # ------------------------------------------------------------ requests

    def add(self, rollout: str, tokens: list[int], max_new_tokens: int, forced: bool) -> None:
        """Queue a request."""
        sampling = SamplingParams(
            temperature=self._temperature,
            max_tokens=max_new_tokens,
            ignore_eos=forced,
            stop_token_ids=None if forced or self._eos is None else [self._eos],
            logprobs=0,  # of the sampled token and no other
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        id = self._engine.add_request(rollout, {"prompt_token_ids": tokens, "cache_salt": str(self._salt)}, sampling)
        self._live[rollout] = Live(id)
        self._names[id] = rollout

    def step(self) -> None:
        """Make one step; afterwards its tokens are here."""
        for output in self._engine.step():
            live, (part,) = self._live[output.request_id], output.outputs
            live.tokens += part.token_ids
            live.logprobs += (
                each[token].logprob for token, each in zip(part.token_ids, part.logprobs or (), strict=True)
            )
            if output.finished:
                self._ended.append(self._forget(output.request_id))

    def _forget(self, rollout: str) -> Output:
        live = self._live.pop(rollout)
        del self._names[live.id]
        return Output(rollout, live.tokens, live.logprobs)

    def ended(self) -> list[Output]:
        """Requests that finished since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def progress(self) -> dict[str, int]:
        """Tokens generated by each live request."""
        return {rollout: len(live.tokens) for rollout, live in self._live.items()}

    def cancel(self, rollout: str) -> Output:
        """Drop a live request and its KV; what it had generated. (vLLM's own synchronous abort tells nothing.)"""
        self._engine.abort_request([self._live[rollout].id], internal=True)
        return self._forget(rollout)

    def _work(self, planned: SchedulerOutput) -> Work:
        decoding = kv_tokens = prompt_tokens = 0
        for id, size in planned.num_scheduled_tokens.items():
            request: Request = self._scheduler.requests[id]
            # A request decodes when its context, all but the newest token, is in the cache already. The scheduler
            # has counted this step's tokens as computed by now.
            if size == 1 and request.num_output_tokens:
                decoding += 1
                kv_tokens += request.num_computed_tokens - size
            else:
                prompt_tokens += size
        return Work(decoding, kv_tokens, prompt_tokens, [self._names[id] for id in planned.num_scheduled_tokens])

    # ------------------------------------------------------------ KV

    def standing(self) -> bool:
        """Whether any request stands on KV."""
        return bool(self._scheduler.running)

    def retract(self) -> None:
        """Preempt every request that stands on KV; all cached KV is forgotten."""
        self._engine.reset_prefix_cache(reset_running_requests=True)

    def forget(self) -> None:
        """Forget all cached KV. Raises RuntimeError if vLLM won't, because a request stands on it."""
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")

    def renew(self) -> None:
        """Share no KV computed so far with what begins from now on; requests that stand on theirs keep it."""
        if self._engine.reset_prefix_cache():
            return
        # Refused because of those. A salt goes into the hash of every page; the queued ones need the new one, too.
        self._salt += 1
        for request in self._scheduler.requests.values():
            if request.status != RequestStatus.RUNNING:
                request.cache_salt = str(self._salt)
                request.block_hashes.clear()
                request.update_block_hashes()

    # ------------------------------------------------------------ weights and memory

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Load parameters under their Hugging Face names, and call them `version`."""
        self._core.collective_rpc("reload_weights", kwargs={"weights_iterator": detached(weights)})
        self._core.set_weight_version(str(version))

    def sleep(self, level: int) -> None:
        """Sleep as vLLM can here; no request stands on KV."""
        self._engine.sleep(level, mode="keep")

    def wake(self, parts: Sequence[str]) -> None:
        """Wake these parts."""
        self._engine.wake_up([TAGS[part] for part in parts])


def detached(weights: Mapping[str, torch.Tensor]) -> Iterable[tuple[str, torch.Tensor]]:
    """Names and tensors, as a loader takes them."""
    return ((name, tensor.detach()) for name, tensor in weights.items())
