"""Moving weights from a trainer to engines, seen from the parent: which bytes go into which bucket, and the three ways
of moving buckets. Nothing here loads torch; the children's half is in `weights`.

* `SharedBuckets`: one staging buffer of shared memory, used again for every bucket, stop and wait: the trainer packs
  bucket j, every engine copies it, then comes bucket j + 1. (On GPUs the same scheme runs over CUDA IPC.)
* `BroadcastBuckets`: the trainer broadcasts each bucket to all engines at once over gloo.
* `Checkpoints`: the trainer writes a checkpoint file once, and every engine reads it bucket by bucket.

Each way a push begins with the trainer's offer: nothing touches an engine before the trainer is idle and has the
version asked for, and no engine counts as updated whose checksum differs from the offered one. A silent member is an
error by its client's limits (see `limits`); nothing here has a limit of its own but the broadcast group.

The staging buffer is an anonymous memory file that children open through /proc: it has no name, so that no crash of
anybody can leave a segment behind in /dev/shm.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from .answers import Moved, Offered, Packed, Updated
from .child import ChildDied
from .commands import Piece

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
    """A finished push. Weights that reached only some engines are told by `failed`."""

    version: int
    checksum: str
    bytes: list[int]  # of each bucket
    ns: list[int]  # of each bucket, from the order to pack it to the last engine's acknowledgement
    updated: dict[str, Updated]  # by engine
    failed: dict[str, Exception]  # by engine; its weights are torn and it refuses to generate


class TornWeights(Exception):  # noqa: N818
    """An engine's weights are not, or not certainly, what the trainer offered."""


class Member(Protocol):
    """What a broadcast group needs of its members."""

    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None: ...
    async def leave(self) -> None: ...


class Source(Member, Protocol):
    """What a transport needs of a trainer."""

    async def host(self) -> str: ...
    async def offer(self, version: int, bucket_bytes: int) -> Offered: ...
    async def pack(self, path: str, size: int, index: int, version: int) -> Packed: ...
    async def send(self, bucket_bytes: int, index: int, version: int, ahead: bool = False) -> Moved: ...
    async def save(self, path: str, version: int) -> Moved: ...


class Sink(Member, Protocol):
    """What a transport needs of an engine."""

    name: str

    async def begin_update(self, version: int) -> None: ...
    async def copy_bucket(self, path: str, size: int, pieces: list[Piece]) -> Moved: ...
    async def receive(self, bucket_bytes: int, index: int) -> Moved: ...
    async def read_bucket(self, path: str, bucket_bytes: int, index: int) -> Moved: ...
    async def end_update(self, version: int) -> Updated: ...


class Buckets:
    """What the transports share: bucket after bucket, stop and wait. An engine that fails is left behind."""

    label: str

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        self.bucket_bytes = bucket_bytes

    async def push(
        self,
        source: Source,
        sinks: Sequence[Sink],
        version: int,
        on_bucket: Callable[[str, int, int, int], None] = lambda _sink, _index, _bytes, _ns: None,
    ) -> Pushed:
        """Move version `version` to engines that are paused already; none is paused or resumed here.

        Raises what the trainer's side raises: `Refused` if it has another version, `ChildDied` if it falls silent
        (its offer may take as long as a training call). Engines' failures are in the result.
        """
        offered = await source.offer(version, self.bucket_bytes)
        await self._stage(source, version, offered.checksum)
        standing = Standing(sinks)
        await self._meet(source, standing)
        await standing.each(lambda sink: sink.begin_update(version))
        sizes: list[int] = []
        times: list[int] = []
        for index in range(offered.buckets):
            if not standing.sinks:
                break
            began = time.monotonic_ns()
            sizes.append(await self._pass(source, standing, index, version))
            times.append(time.monotonic_ns() - began)
            for name in standing.sinks:
                on_bucket(name, index, sizes[-1], times[-1])
        updated = await standing.each(lambda sink: sink.end_update(version))
        for name, update in list(updated.items()):
            if update.checksum != offered.checksum:
                standing.failed[name] = TornWeights(f"{name} has {update.checksum}, offered was {offered.checksum}")
                del updated[name]
        return Pushed(version, offered.checksum, sizes, times, updated, standing.failed)

    async def prepare(self, source: Source, sinks: Sequence[Sink]) -> None:
        """Whatever can be done before a push to these engines. A push does it too, on its own time."""
        standing = Standing(sinks)
        await self._meet(source, standing)
        for error in standing.failed.values():
            raise error

    async def _meet(self, source: Source, standing: Standing) -> None:
        """Bring trainer and engines together."""

    async def _stage(self, source: Source, version: int, checksum: str) -> None:
        """Whatever is done once for a version, before any engine takes part."""

    async def _pass(self, source: Source, standing: Standing, index: int, version: int) -> int:
        """Move one bucket; its bytes."""
        raise NotImplementedError

    async def close(self) -> None:
        """Let go of everything."""


class SharedBuckets(Buckets):
    """Buckets through one staging buffer of shared memory. An engine that fails doesn't keep the others."""

    label = "shared memory buckets"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(bucket_bytes)
        self._file = os.memfd_create(f"rlsched-{os.getpid()}", os.MFD_CLOEXEC)
        os.ftruncate(self._file, bucket_bytes)
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"

    async def _pass(self, source: Source, standing: Standing, index: int, version: int) -> int:
        packed = await source.pack(self.path, self.bucket_bytes, index, version)
        await standing.each(lambda sink: sink.copy_bucket(self.path, self.bucket_bytes, packed.pieces))
        return packed.bytes

    async def close(self) -> None:
        """Let go of the buffer; it is gone when the last child has unmapped it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class BroadcastBuckets(Buckets):
    """Buckets broadcast over gloo. The group is formed by the first push, and again when its members change or it has
    failed. One dead member fails the push to all: what is in flight then can't be told from what has arrived.

    `overlap`: the trainer packs the next bucket while one is on its way. `timeout_s`: longest wait of a member for its
    peers, after which it says so; one that says nothing is then known by its silence.
    """

    label = "gloo broadcast buckets"

    def __init__(self, bucket_bytes: int = BUCKET_BYTES, timeout_s: float = 10.0, overlap: bool = False) -> None:
        super().__init__(bucket_bytes)
        self.timeout_s = timeout_s
        self.overlap = overlap
        self._members: tuple[Member, ...] = ()

    async def _meet(self, source: Source, standing: Standing) -> None:
        """Form the group, if these members don't form one already."""
        members = (source, *standing.sinks.values())
        if self._members == members:
            return
        await self.close()
        address, size = await source.host(), len(members)
        ranks = {name: rank for rank, name in enumerate(standing.sinks, 1)}
        joining = asyncio.ensure_future(source.join(address, 0, size, self.timeout_s))
        await standing.each(lambda sink: sink.join(address, ranks[sink.name], size, self.timeout_s))
        (outcome,) = await asyncio.gather(joining, return_exceptions=True)
        if isinstance(outcome, BaseException) and (isinstance(outcome, ChildDied) or not standing.failed):
            raise outcome
        if standing.failed:
            standing.abandon(TornWeights("the broadcast group was not formed: a member is missing"))
        else:
            self._members = members

    async def _pass(self, source: Source, standing: Standing, index: int, version: int) -> int:
        if standing.failed:
            return self._break(standing)  # it has died since they met
        sending = asyncio.ensure_future(source.send(self.bucket_bytes, index, version, self.overlap))
        try:
            await standing.each(lambda sink: sink.receive(self.bucket_bytes, index))
            if standing.failed:
                await asyncio.wait({sending})
                # It has lost that member too, and may or may not say so; unless it is the one that was lost.
                if isinstance(sending.exception(), ChildDied):
                    await sending
                return self._break(standing)
            return (await sending).bytes
        except BaseException:
            self._members = ()
            sending.cancel()
            raise

    def _break(self, standing: Standing) -> int:
        self._members = ()
        standing.abandon(TornWeights("the broadcast group has lost a member"))
        return 0

    async def close(self) -> None:
        """Dissolve the group."""
        members, self._members = self._members, ()
        await asyncio.gather(*(m.leave() for m in members), return_exceptions=True)


class Checkpoints(Buckets):
    """Buckets read from a checkpoint file in `folder`: the trainer writes it once a version, every engine reads it for
    itself. The newest file stays until there is a newer one, for engines that get the same version later; it is read
    through before it is used again, and written anew if it isn't what it was."""

    label = "checkpoint on disk"

    def __init__(self, folder: Path, bucket_bytes: int = BUCKET_BYTES) -> None:
        super().__init__(bucket_bytes)
        self._folder = folder
        self.path = folder

    async def _stage(self, source: Source, version: int, checksum: str) -> None:
        # Version numbers come again with every run; the same checksum is the same file.
        self.path = self._folder / f"version-{version}-{checksum}.safetensors"
        if not self.path.exists() or await asyncio.to_thread(digest, self.path) != checksum:
            await source.save(str(self.path), version)
        self._remove(keep=self.path)

    async def _pass(self, source: Source, standing: Standing, index: int, version: int) -> int:
        moved = await standing.each(lambda sink: sink.read_bucket(str(self.path), self.bucket_bytes, index))
        return max((m.bytes for m in moved.values()), default=0)

    def _remove(self, keep: Path | None) -> None:
        for old in self._folder.glob("version-*"):
            if old != keep:
                old.unlink()

    async def close(self) -> None:
        """Remove the last file."""
        self._remove(keep=None)


class Standing:
    """The engines that still take part in a push."""

    def __init__(self, sinks: Sequence[Sink]) -> None:
        self.sinks = {sink.name: sink for sink in sinks}
        self.failed: dict[str, Exception] = {}

    async def each(self, order: Callable[[Sink], Awaitable[T]]) -> dict[str, T]:
        """Give an order to all engines at once and wait for all; those that fail no longer stand."""
        orders = {name: order(sink) for name, sink in self.sinks.items()}
        outcomes = await asyncio.gather(*orders.values(), return_exceptions=True)
        done: dict[str, T] = {}
        for name, outcome in zip(orders, outcomes, strict=True):
            if isinstance(outcome, Exception):
                self.failed[name] = outcome
                del self.sinks[name]
            elif isinstance(outcome, BaseException):
                raise outcome
            else:
                done[name] = outcome
        return done

    def abandon(self, reason: Exception) -> None:
        """Fail all that still stand."""
        self.failed.update(dict.fromkeys(self.sinks, reason))
        self.sinks = {}


def digest(path: Path) -> str:
    """What `WeightSet.checksum` says of the weights in a safetensors file; "" for a file that can't be read."""
    found = hashlib.blake2b(digest_size=16)
    try:
        with path.open("rb") as file:
            # Eight bytes say how long the header is: JSON, with each tensor's place in what comes after it.
            header = msgspec.json.decode(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            for name in sorted(header.keys() - {"__metadata__"}):
                begin, end = header[name]["data_offsets"]
                found.update(name.encode())
                file.seek(start + begin)
                while begin < end and (part := file.read(min(BUCKET_BYTES, end - begin))):
                    found.update(part)
                    begin += len(part)
    except (OSError, msgspec.DecodeError, KeyError, TypeError, AttributeError, ValueError, OverflowError, MemoryError):
        return ""
    return found.hexdigest()
