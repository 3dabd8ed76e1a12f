"""What every way to run vLLM is started with: the arguments of its engine, from ours."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..commands import Json
from ..config import EngineConfig

CPU_PAGE = 32
"""vLLM's attention on CPU takes pages of a multiple of this many tokens."""
SERVED = "generate-tokens-"
"""vLLM's server puts this before a request's id."""


class Pages(NamedTuple):
    """KV in pages."""

    size: int  # tokens of one
    number: int

    @property
    def tokens(self) -> int:
        """Tokens in all of them."""
        return self.size * self.number


def pages(config: EngineConfig) -> Pages:
    """The KV that a config asks for, in pages that vLLM takes; no more tokens than asked for."""
    size = -(-config.page_size // CPU_PAGE) * CPU_PAGE if config.device == "cpu" else config.page_size
    return Pages(size, config.kv_blocks * config.page_size // size)


def arguments(config: EngineConfig, checkpoint: str) -> dict[str, Any]:
    """Fields of vLLM's `EngineArgs`."""
    model, kv = config.model, pages(config)
    width = getattr(torch, model.dtype).itemsize
    page_bytes = kv.size * model.layers * 2 * model.kv_heads * model.head_dim * width
    return {
        "model": checkpoint,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",  # sampling is what a request says, nothing from the checkpoint
        "dtype": model.dtype,
        "max_model_len": min(model.max_positions, kv.tokens),
        "max_num_seqs": config.max_requests,
        "max_num_batched_tokens": config.max_batch_tokens,
        "block_size": kv.size,
        "num_gpu_blocks_override": kv.number + 1,  # one page is vLLM's own
        "kv_cache_memory_bytes": (kv.number + 1) * page_bytes,
        "logprobs_mode": "processed_logprobs",  # after temperature
        "seed": config.seed,
        "enforce_eager": True,
        "enable_sleep_mode": config.device != "cpu",
        # Scheduled ahead, a step would begin before the last one has ended, and no boundary would lie between them.
        "async_scheduling": False,
        "distributed_executor_backend": "uni",
        "disable_log_stats": True,
    }


def sampling(config: EngineConfig, max_new_tokens: int, forced: bool) -> Json:
    """Fields of vLLM's `SamplingParams`, but for the kind of output."""
    return {
        "temperature": config.temperature,
        "max_tokens": max_new_tokens,
        "ignore_eos": forced,
        "stop_token_ids": [] if forced or config.eos is None else [config.eos],
        "logprobs": 0,  # of the sampled token and no other
        "detokenize": False,
    }
