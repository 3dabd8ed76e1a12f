"""Every knob of an engine and of a trainer. Light: importing it loads neither torch nor an engine."""

from __future__ import annotations

from typing import Literal

import msgspec

from .model import ModelSpec
from .pacing import EnginePace, TrainerPace


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An engine. The defaults suit the tiny model on one CPU core."""

    model: ModelSpec = ModelSpec()
    device: str = "cpu"  # a torch device; with `cuda:N` each engine takes the next GPU, with `cuda` all share the first
    threads: int = 1  # of torch, inside this engine (2 on one core are slower than 1)
    page_size: int = 16  # tokens of a KV page; vLLM `block_size` (16), transformers `page_size` (256)
    kv_blocks: int = 512  # pages of KV; vLLM `num_gpu_blocks_override`, transformers `num_blocks`
    max_batch_tokens: int = 512  # computed in one step, prompts chunked to it; vLLM `max_num_batched_tokens`
    max_requests: int = 64  # in one step; vLLM `max_num_seqs`, transformers `max_requests_per_batch` (1024)
    temperature: float = 1.0  # 0: greedy; logprobs are reported after temperature
    eos: int | None = 2  # ends a request that is not forced to a length
    seed: int = 0  # of sampling; the tokens of one request still depend on its batch mates
    pace: EnginePace | None = None  # None: as fast as it goes


class TrainerConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trainer: Adam on a clipped-ratio policy gradient with group-relative advantages (GRPO)."""

    model: ModelSpec = ModelSpec()
    device: str = "cpu"  # a torch device
    threads: int = 1  # of torch
    lr: float = 1e-3
    max_grad_norm: float = 1.0  # gradients are clipped to this norm; verl `grad_clip` (1.0)
    minibatches: int = 1  # optimizer steps in a trainer call, of whole groups each
    clip_low: float = 0.2  # ratio may fall to 1 - clip_low; verl `clip_ratio_low` (0.2)
    clip_high: float = 0.2  # and rise to 1 + clip_high; verl `clip_ratio_high` (0.2)
    ratio: Literal["engine", "recomputed"] = "engine"  # denominator: the engine's logprobs, or the old_logprob phase's
    ref_weight: float = 0.0  # of the KL term against version 0; 0: no ref phase; verl `kl_loss_coef` (0.001)
    temperature: float = 1.0  # the engine's, so that logprobs compare; not 0
    seed: int = 0
    pace: TrainerPace | None = None  # None: as fast as it goes
