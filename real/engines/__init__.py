"""What every engine is to the rest of the world, whichever library stands behind it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

import msgspec

from ..answers import Aborted, Counted, Digest, Flushed, Moved, Progress, Slept, Step, Updated, Woken
from ..commands import PauseMode, Piece


class Capabilities(msgspec.Struct, frozen=True, kw_only=True):
    """What this engine can do *here*: asked of the running engine, not read from its documentation."""

    engine: str  # "transformers", "vllm", "sglang"
    version: str  # of that library
    device: str  # "cpu", "cuda"
    max_request_tokens: int  # longest prompt + output of one request; longer ones are refused
    kv_tokens: int  # tokens of KV
    page_size: int = 1  # tokens of a KV page
    max_requests: int  # in one step
    max_batch_tokens: int  # in one step
    pause_modes: tuple[PauseMode, ...]
    flush_live: bool  # live requests can be made to recompute their KV (retract)
    sleep_levels: tuple[int, ...]
    sleep_frees: tuple[str, ...]  # of "weights", "kv": what a level 2 sleep really gives back here
    wake_tags: tuple[str, ...]  # what can be woken by itself
    transports: tuple[str, ...]  # "shared", "broadcast", "disk"
    in_place_update: bool  # requests can live through an update
    abort_partials: bool  # an aborted request reports its tokens, queued ones included
    step_trace: bool


class Engine(Protocol):
    """An engine client, driven by one asyncio task or many. Every method raises `ChildDied` once the engine is gone,
    `Refused` when the command makes no sense now, and `CommandFailed` when it was tried in vain.

    Ended requests don't come back from `submit`: they are told to the client's `on_ended`, before the answer of
    whatever ended them.
    """

    name: str
    capabilities: Capabilities

    async def submit(self, rollout: str, tokens: list[int], max_new_tokens: int, *, forced: bool = True) -> None: ...
    async def abort(self, rollouts: Iterable[str] | None = None) -> Aborted: ...
    async def pause(self, mode: PauseMode = "keep") -> Progress: ...
    async def resume(self) -> Progress: ...
    async def flush(self, *, recompute: bool = False) -> Flushed: ...
    async def sleep(self, level: Literal[1, 2]) -> Slept: ...
    async def wake(self, tags: Iterable[str] = ("weights", "kv")) -> Woken: ...
    async def begin_update(self, version: int) -> None: ...
    async def copy_bucket(self, path: str, size: int, pieces: list[Piece]) -> Moved: ...
    async def receive(self, bucket_bytes: int, index: int) -> Moved: ...
    async def read_bucket(self, path: str, bucket_bytes: int, index: int) -> Moved: ...
    async def end_update(self, version: int) -> Updated: ...
    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None: ...
    async def leave(self) -> None: ...
    async def trace(self, on: bool) -> list[Step]: ...
    async def checksum(self) -> Digest: ...
    async def count(self) -> Counted: ...
    async def reset(self, seed: int) -> None: ...
    async def close(self, timeout: float = 5.0) -> None: ...
