"""What an SGLang server is started with, and what each `/generate` asks it."""

from __future__ import annotations

from ..commands import Json
from ..config import EngineConfig
from .hosted_requests import Request


def body_of(request: Request, temperature: float, eos: int | None) -> Json:
    """What `/generate` is asked."""
    forced = request.command.forced
    sampling: Json = {
        "temperature": temperature,
        "max_new_tokens": request.command.max_new_tokens,
        "ignore_eos": forced,
    }
    if not forced and eos is not None:
        sampling["stop_token_ids"] = [eos]
    return {
        "rid": request.rid,
        "input_ids": request.command.tokens,
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": -1,  # of the output alone
    }


def arguments_of(config: EngineConfig, folder: str, sharing: bool) -> list[str]:
    """The server's command line."""
    chosen = {
        "model-path": folder,
        "device": config.device,
        "attention-backend": "torch_native",
        "sampling-backend": "pytorch",
        "grammar-backend": "none",
        "dtype": config.model.dtype,
        "max-total-tokens": config.kv_blocks * config.page_size,
        "page-size": config.page_size,
        "max-running-requests": config.max_requests,
        "chunked-prefill-size": config.max_batch_tokens,
        "max-prefill-tokens": config.max_batch_tokens,
        "random-seed": config.seed,
        "weight-version": 0,
        "log-level": "warning",
    }
    # No tokenizer: nothing but token ids comes and goes. Overlapped, a step's tokens would come out only after the next
    # step has begun.
    switches = ["skip-tokenizer-init", "skip-server-warmup", "sleep-on-idle", "disable-overlap-schedule"]
    if not sharing:
        switches.append("disable-radix-cache")
    valued = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    return [*valued, *(f"--{name}" for name in switches)]
