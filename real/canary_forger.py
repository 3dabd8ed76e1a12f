"""A source of canary weights that lies: it sends what it is told to, under any version number and checksum.

Where a trainer can't be brought to send half of an update or old bytes under a new number, this can. It is the parent
itself, so that no wire command exists to make a trainer lie.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import canary
from .answers import Moved, Offered, Packed
from .weights import Group, Staging, WeightSet
from .wire import Refused

if TYPE_CHECKING:
    from torch import Tensor


class Forger:
    """A `transport.Source` in this process."""

    def __init__(self) -> None:
        self._tensors: dict[str, Tensor] = canary.state(0)
        self._weights = WeightSet(self)
        self._staging = Staging()
        self._group = Group()
        self.hold(0)

    def named_parameters(self) -> Iterable[tuple[str, Any]]:
        """What a `WeightSet` asks of a model."""
        return self._tensors.items()

    def hold(
        self, called: int, version: int | None = None, old: Iterable[str] = (), half: bool = False, honest: bool = True
    ) -> None:
        """From now on: the weights of ``version`` (None: as called), but parameters ``old`` of the version before.

        ``half``: only the first half of the buckets is offered. ``honest``: the checksum is of what should have been
        sent, as of a trainer whose bytes were lost on the way; otherwise of what is.
        """
        whole = canary.state(called if version is None else version)
        before = canary.state(called - 1)
        self._called, self._half = called, half
        self._copy({**whole, **{name: before[name] for name in old}})
        checksum = self._weights.checksum()
        if honest and (old or half):
            self._copy(whole)
            checksum = self._weights.checksum()
            self._copy({name: before[name] for name in old})
        self._checksum = checksum

    def _copy(self, tensors: dict[str, Any]) -> None:
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)

    def _require(self, version: int) -> None:
        if version != self._called:
            raise Refused(f"the weights are called version {self._called}, not {version}")

    async def offer(self, version: int, bucket_bytes: int) -> Offered:
        """The buckets that will be sent, and the checksum that is claimed."""
        self._require(version)
        buckets = len(self._weights.buckets(bucket_bytes))
        return Offered(buckets // 2 if self._half else buckets, self._checksum)

    async def pack(self, path: str, size: int, index: int, version: int) -> Packed:
        """Write one bucket into shared memory."""
        self._require(version)
        began = time.monotonic_ns()
        pieces = self._weights.buckets(size)[index]
        used = self._weights.pack(self._staging.at(path, size), pieces)
        return Packed(pieces, used, time.monotonic_ns() - began)

    async def send(self, bucket_bytes: int, index: int, version: int, ahead: bool = False) -> Moved:
        """Send one bucket to the broadcast group."""
        self._require(version)
        began = time.monotonic_ns()
        pieces, *later = self._weights.buckets(bucket_bytes)[index:]
        sent = await asyncio.to_thread(self._group.send, self._weights, pieces, later[0] if ahead and later else ())
        return Moved(sent, time.monotonic_ns() - began)

    async def save(self, path: str, version: int) -> Moved:
        """Write a checkpoint file."""
        self._require(version)
        began = time.monotonic_ns()
        return Moved(self._weights.save(Path(path)), time.monotonic_ns() - began)

    async def host(self) -> str:
        """Open the place where a broadcast group will meet; its address."""
        # As for children: gloo would otherwise ask a name service for this host's address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        return await asyncio.to_thread(self._group.host)

    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join a broadcast group."""
        await asyncio.to_thread(self._group.join, address, rank, world_size, timeout_s)

    async def leave(self) -> None:
        """Leave it."""
        await asyncio.to_thread(self._group.leave)
