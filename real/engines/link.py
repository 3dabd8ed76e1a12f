"""What a scheduler in a process of its own tells the engine child: every step, every pause, every request that it took.

A library's own answers say neither what a step computed nor when a pause has taken effect. (SGLang answers
`/pause_generation`, or is silent to `/generate`, before its scheduler has seen them.) A hook in the scheduler's process
sends these records over a Unix socket. It is in the abstract namespace: no file, nothing to clean up. The other way go
a few orders, which the scheduler's loop carries out when it comes by; so an answer also says that it does come by.

Here are the records and the child's end. Nothing but msgspec is imported.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from collections.abc import Callable

import msgspec

from ..answers import Step
from ..pacing import StepCost

LINK = "RLSCHED_LINK"
"""Environment variable that holds a `Terms` as JSON."""
HEADER = struct.Struct(">I")


class Terms(msgspec.Struct, frozen=True):
    """What the hook needs to know."""

    address: str  # name of the abstract socket, without its leading zero byte
    pace: StepCost | None  # None: steps are not held


class Totals(msgspec.Struct, frozen=True, array_like=True):
    """A pacer's counters since the server's start."""

    held: int = 0
    declared_ns: int = 0
    overruns: int = 0
    overrun_ns: int = 0


class Taken(msgspec.Struct, frozen=True, array_like=True, tag="taken"):
    """The scheduler has this request in its queue."""

    rid: str


class Stepped(msgspec.Struct, frozen=True, array_like=True, tag="stepped"):
    """A step is over. `made`: tokens that each of its requests has generated."""

    step: Step
    made: dict[str, int]
    totals: Totals


class Stood(msgspec.Struct, frozen=True, array_like=True, tag="stood"):
    """A pause has taken effect. `standing`: the requests that hold KV."""

    standing: list[str]
    live: list[str] | None = None  # all that have not ended; None: it doesn't say


class Obeyed(msgspec.Struct, frozen=True, array_like=True, tag="obeyed"):
    """The scheduler's loop has come by, and carried this order out."""

    order: int


Record = Taken | Stepped | Stood | Obeyed


class Order(msgspec.Struct, frozen=True, array_like=True):
    """What the child asks of the scheduler's loop. Orders are numbered from 1."""

    number: int
    seed: int | None = None  # of sampling, from now on; None: only say that the loop comes by


def frame(message: Record | Order) -> bytes:
    """One message as bytes on the socket."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


def unframe(data: bytes) -> tuple[list[bytes], bytes]:
    """The whole messages in `data`, and what is left."""
    found: list[bytes] = []
    at = 0
    while len(data) - at >= HEADER.size:
        (length,) = HEADER.unpack_from(data, at)
        begin, end = at + HEADER.size, at + HEADER.size + length
        if end > len(data):
            break
        found.append(data[begin:end])
        at = end
    return found, data[at:]


class Link:
    """The child's end. `on_record` is called for every record, in order, in the event loop's thread."""

    def __init__(self, on_record: Callable[[Record], None]) -> None:
        self.address = f"rlsched-link-{os.getpid()}"
        self._on_record = on_record
        self._decoder = msgspec.msgpack.Decoder(Record)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self.address}")
        self._listener.listen(1)
        self._listener.setblocking(False)
        self._peer: socket.socket | None = None
        self._rest = b""
        self._ordered = self._obeyed = 0  # numbers of the last orders given, and carried out
        self._news = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _accept(self) -> None:
        peer, _ = self._listener.accept()
        peer.setblocking(False)
        self._peer = peer
        asyncio.get_running_loop().add_reader(peer, self.drain)
        self._wake()

    def drain(self) -> None:
        """Take all that has come. What the scheduler told before it answered a request is here when the answer is."""
        if self._peer is None:
            return
        ended = False
        while not ended:
            try:
                data = self._peer.recv(1 << 16)
            except BlockingIOError:
                break
            self._rest += data
            ended = not data
        found, self._rest = unframe(self._rest)
        for message in found:
            record = self._decoder.decode(message)
            if isinstance(record, Obeyed):
                self._obeyed = record.order
            else:
                self._on_record(record)
        self._wake()
        if ended:
            self._hang_up()

    def _wake(self) -> None:
        """Whoever waits looks again."""
        self._news.set()
        self._news.clear()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait for a condition that only records can bring about."""
        self.drain()
        while not condition():
            await self._news.wait()

    async def order(self, seed: int | None = None) -> None:
        """Have the scheduler's loop come by, and seed sampling if a seed is given; return when it has."""
        await self.until(lambda: self._peer is not None)
        assert self._peer is not None
        self._ordered += 1
        number = self._ordered
        self._peer.sendall(frame(Order(number, seed)))
        await self.until(lambda: self._obeyed >= number)

    def _hang_up(self) -> None:
        if self._peer is not None:
            asyncio.get_running_loop().remove_reader(self._peer)
            self._peer.close()
            self._peer = None

    def close(self) -> None:
        """Let go of the socket."""
        self._hang_up()
        asyncio.get_running_loop().remove_reader(self._listener)
        self._listener.close()
