"""How messages cross the socket between rlsched and a child process: envelopes and frames.

A frame is a four-byte big-endian length and a msgpack body, so that a child written for another interpreter (vLLM and
SGLang pin a torch of their own) needs nothing but msgpack. The parent sends `Call`s; the child sends one `Answer` or
`Failure` for each, in any order, and `Notice`s unasked. Frames are in order on one socket: whatever a child announces
before an answer is seen before it.
"""

from __future__ import annotations

import socket
import struct
import threading

import msgspec

from .answers import Event, Result
from .commands import Command


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Parent to child."""

    id: int
    command: Command


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Child to parent: call `id` was done."""

    id: int
    result: Result


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Child to parent: call `id` was not done. The child lives on."""

    id: int
    error: str
    refused: bool  # True: the command made no sense now and changed nothing; False: it was tried and failed


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """Child to parent, unasked."""

    event: Event


Upward = Answer | Failure | Notice

HEADER = struct.Struct(">I")


class Refused(Exception):  # noqa: N818
    """A command that makes no sense now; it changed nothing."""


def frame(message: Call | Upward) -> bytes:
    """One message as bytes on the wire."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


class Port:
    """A child's end of the socket: blocking reads by one thread, writes by any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(Call)
        self._lock = threading.Lock()

    def receive(self) -> Call | None:
        """The next call; None when the parent has closed its end or is gone."""
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        body = self._reader.read(length)
        return self._decoder.decode(body) if len(body) == length else None

    def send(self, message: Upward) -> None:
        """Write one frame whole. A parent that is gone is not an error here: `receive` reports it."""
        data = frame(message)
        with self._lock:
            try:
                self._socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return

    def notify(self, event: Event) -> None:
        """Send an event unasked."""
        self.send(Notice(event))
