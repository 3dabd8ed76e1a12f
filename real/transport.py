"""Moving weights from a trainer to engines, seen from the parent: which bytes go into which bucket, and the two ways
of moving buckets. Nothing here loads torch; the children's half is in `weights`.

* `SharedBuckets`: one staging buffer of shared memory, used again for every bucket, stop and wait: the trainer packs
  bucket j, every engine copies it, then comes bucket j + 1. (On GPUs the same scheme runs over CUDA IPC.)
* `BroadcastBuckets`: the trainer broadcasts each bucket to all engines at once over gloo.

The staging buffer is an anonymous memory file that children open through /proc: it has no name, so that no crash of
anybody can leave a segment behind in /dev/shm.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from .wire import Moved, Packed, Piece, Updated

T = TypeVar("T")

#: Bytes of a bucket unless told otherwise. verl's `update_weights_bucket_megabytes` is 512 MB, for GPUs.
BUCKET_BYTES = 4 << 20


class Tensor(msgspec.Struct, frozen=True, array_like=True):
    """A parameter as the plan sees it."""

    name: str
    count: int  # elements
    itemsize: int  # bytes of an element


def plan(tensors: Iterable[Tensor], bucket_bytes: int) -> list[list[Piece]]:
    """Lay parameters into buckets, in the order given.

    Every piece is aligned to its element size; a tensor that doesn't fit into what is left of a bucket is split, so
    that one larger than a bucket is nothing special. Raises ValueError if a bucket can't hold a single element.
    """
    buckets: list[list[Piece]] = []
    current: list[Piece] = []
    offset = 0
    for tensor in tensors:
        if tensor.itemsize > bucket_bytes:
            raise ValueError(f"a bucket of {bucket_bytes} bytes can't hold an element of {tensor.name}")
        start = 0
        while start < tensor.count:
            offset = -(-offset // tensor.itemsize) * tensor.itemsize
            count = min(tensor.count - start, max(0, bucket_bytes - offset) // tensor.itemsize)
            if count == 0:
                buckets.append(current)
                current, offset = [], 0
                continue
            current.append(Piece(tensor.name, start, count, offset))
            start += count
            offset += count * tensor.itemsize
    return [*buckets, current] if current else buckets


class Pushed(msgspec.Struct, frozen=True):
    """A finished push. A set of weights that reached only some engines is told by `failed`."""

    version: int
    bytes: list[int]  # of each bucket
    ns: list[int]  # of each bucket, from the order to pack it to the last engine's acknowledgement
    updated: dict[str, Updated]  # by engine
    failed: dict[str, Exception]  # by engine; its weights are torn and it refuses to generate


class Source(Protocol):
    """What a transport needs of a trainer."""

    async def pack(self, path: str, size: int, index: int, version: int) -> Packed: ...
    async def broadcast(self, bucket_bytes: int, version: int) -> Moved: ...
    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None: ...
    async def leave(self) -> None: ...


class Sink(Protocol):
    """What a transport needs of an engine."""

    @property
    def name(self) -> str: ...
    async def begin_update(self, version: int) -> None: ...
    async def copy_bucket(self, path: str, size: int, pieces: list[Piece]) -> Moved: ...
    async def receive(self, bucket_bytes: int) -> Moved: ...
    async def end_update(self, version: int) -> Updated: ...
    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None: ...
    async def leave(self) -> None: ...


class Transport(Protocol):
    """A way of moving a whole set of weights. Engines must be paused; they are neither paused nor resumed here."""

    async def push(self, source: Source, sinks: Sequence[Sink], version: int) -> Pushed: ...
    async def close(self) -> None: ...


class SharedBuckets:
    """Buckets through one staging buffer of shared memory. An engine that fails is left behind, the others go on."""

    label = "shared memory buckets"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes
        self._file = os.memfd_create(f"rlsched-{os.getpid()}", os.MFD_CLOEXEC)
        os.ftruncate(self._file, bucket_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    async def push(self, source: Source, sinks: Sequence[Sink], version: int) -> Pushed:
        """Move version `version`. Raises what the trainer's side raises; engines' failures are in the result."""
        progress = _Progress(version, sinks)
        await progress.each(lambda sink: sink.begin_update(version))
        index, buckets = 0, 1
        while index < buckets:
            began = time.monotonic_ns()
            packed = await source.pack(self.path, self.bucket_bytes, index, version)
            copy = packed.pieces
            await progress.each(lambda sink, copy=copy: sink.copy_bucket(self.path, self.bucket_bytes, copy))
            progress.bucket(packed.bytes, time.monotonic_ns() - began)
            index, buckets = index + 1, packed.buckets
        return await progress.finish()

    async def close(self) -> None:
        """Let go of the buffer; it is gone when the last child has unmapped it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class BroadcastBuckets:
    """Buckets broadcast over gloo. The group is formed by the first push and again whenever its members change or it
    has failed; a dead member fails the push of all, after `timeout_s` at the latest."""

    label = "gloo broadcast buckets"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = 10.0) -> None:
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self._members: list[Source | Sink] = []

    async def push(self, source: Source, sinks: Sequence[Sink], version: int) -> Pushed:
        """Move version `version`. Raises what the trainer's side raises; engines' failures are in the result."""
        if self._members != [source, *sinks]:
            await self._form(source, sinks)
        progress = _Progress(version, sinks)
        await progress.each(lambda sink: sink.begin_update(version))
        sending = asyncio.ensure_future(source.broadcast(self.bucket_bytes, version))
        try:
            received = await progress.each(lambda sink: sink.receive(self.bucket_bytes))
            sent = await sending
        except BaseException:
            self._members = []
            sending.cancel()
            raise
        if progress.failed:
            self._members = []
        # A bucket has passed when the slowest engine has copied it.
        for j, size in enumerate(sent.bytes):
            progress.bucket(size, max(sent.ns[j], *(moved.ns[j] for moved in received.values())))
        return await progress.finish()

    async def _form(self, source: Source, sinks: Sequence[Sink]) -> None:
        await self.close()
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{probe.getsockname()[1]}"
        members = [source, *sinks]
        joins = [m.join(address, rank, len(members), self.timeout_s) for rank, m in enumerate(members)]
        outcomes = await asyncio.gather(*joins, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
        self._members = members

    async def close(self) -> None:
        """Dissolve the group."""
        members, self._members = self._members, []
        await asyncio.gather(*(member.leave() for member in members), return_exceptions=True)


class _Progress:
    """One push under way: which engines still stand, and what passed."""

    def __init__(self, version: int, sinks: Sequence[Sink]) -> None:
        self._version = version
        self._standing = {sink.name: sink for sink in sinks}
        self._bytes: list[int] = []
        self._ns: list[int] = []
        self.failed: dict[str, Exception] = {}

    async def each(self, order: Callable[[Sink], Awaitable[T]]) -> dict[str, T]:
        """Give an order to all standing engines at once and wait for all; those that fail no longer stand."""
        names = list(self._standing)
        outcomes = await asyncio.gather(*(order(self._standing[name]) for name in names), return_exceptions=True)
        done: dict[str, T] = {}
        for name, outcome in zip(names, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.failed[name] = outcome
                del self._standing[name]
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                done[name] = outcome
        return done

    def bucket(self, size: int, ns: int) -> None:
        """One bucket has passed."""
        self._bytes.append(size)
        self._ns.append(ns)

    async def finish(self) -> Pushed:
        """Close the update on all standing engines."""
        updated = await self.each(lambda sink: sink.end_update(self._version))
        return Pushed(self._version, self._bytes, self._ns, updated, self.failed)
