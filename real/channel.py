"""The parent's end of one child's socket: calls and their answers, and what becomes of a child that gives none.

A child that leaves an order unanswered for longer than its `Limits` allow, or stands still for as long, is killed. An
engine that nobody has heard of is asked for a sign of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from . import answers, commands, wire
from .child import Child, ChildDied
from .limits import Limits

R = TypeVar("R", bound=commands.Message)
GRACE_S = 1.0
"""Whoever was stopped oneself finds limits exceeded and answers that have come; these are read first."""


class CommandFailed(Exception):  # noqa: N818
    """The child tried to carry out a command and could not; it lives on."""


class Channel:
    """Calls and answers over one child's socket."""

    def __init__(
        self,
        child: Child,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        on_event: Callable[[answers.Event], None],
        on_down: Callable[[ChildDied], None],
        limits: Limits,
    ) -> None:
        self.limits = limits
        self._child = child
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._on_down = on_down
        self._pending: dict[int, asyncio.Future[answers.Result]] = {}
        self._next = 0
        self._down: ChildDied | None = None
        self._closing = False
        self.pinged = False
        """Whether it is asked for signs of life, which one that answers no order for long can't give."""
        self._heard = time.monotonic()
        self._task = asyncio.create_task(self._listen(), name=f"listen to {child.name}")
        self._watch = asyncio.create_task(self._beat(), name=f"watch {child.name}")

    @classmethod
    async def open(
        cls,
        child: Child,
        on_event: Callable[[answers.Event], None],
        on_down: Callable[[ChildDied], None],
        limits: Limits,
    ) -> Channel:
        """Take over the parent's end of the child's socket."""
        reader, writer = await asyncio.open_connection(sock=child.socket)
        return cls(child, reader, writer, on_event, on_down, limits)

    async def call(self, command: commands.Command, answer: type[R], limit_s: float | None = None) -> R:
        """Send a command and wait for its answer. Abandoning the wait does not take the command back.

        A child that gives none within `limit_s` (None: the limit of controls) is killed, and `ChildDied` raised.
        """
        if self._down is not None:
            raise self._down
        limit = self.limits.control_s if limit_s is None else limit_s
        self._next += 1
        future = asyncio.get_running_loop().create_future()
        self._pending[self._next] = future
        self._writer.write(wire.frame(wire.Call(self._next, command)))
        try:
            done, _ = await asyncio.wait({future}, timeout=limit)
            if not done:
                done, _ = await asyncio.wait({future}, timeout=GRACE_S)
            if not done:
                self._child.condemn(f"did not answer {type(command).__name__} in {limit:g} s")
            result = await future
        finally:
            future.cancel()  # nobody will read it
        if not isinstance(result, answer):
            raise CommandFailed(f"{type(command).__name__} was answered by {type(result).__name__}")
        return result

    async def _beat(self) -> None:
        """See every now and then what the child holds, that it doesn't stand still, and that it is there at all."""
        still: dict[tuple[int, int], float] = {}
        while True:
            await asyncio.sleep(min(self.limits.beat_s, self.limits.control_s / 2))
            self._child.look()
            now = time.monotonic()
            still = {one: still.get(one, now) for one in self._child.stopped}
            if any(now - since >= self.limits.control_s for since in still.values()):
                self._child.condemn(f"was stopped by a signal for {self.limits.control_s:g} s")
            elif self.pinged and not self._pending and now - self._heard >= self.limits.beat_s:
                with contextlib.suppress(ChildDied, CommandFailed, wire.Refused):
                    await self.call(commands.Ping(), answers.Done)

    async def _listen(self) -> None:
        decoder = msgspec.msgpack.Decoder(wire.Upward)
        ended = asyncio.Event()
        watch = os.pidfd_open(self._child.pid)
        loop = asyncio.get_running_loop()
        # The socket alone may stay open in a grandchild, the process alone may hang on a closed socket: watch both.
        loop.add_reader(watch, ended.set)
        death = asyncio.create_task(ended.wait())
        listening = asyncio.create_task(self._frames(decoder))
        try:
            await asyncio.wait({death, listening}, return_when=asyncio.FIRST_COMPLETED)
            # What it said last may still be in the socket; and a process whose socket is closed is about to end.
            await asyncio.wait({death, listening}, timeout=0.5)
        finally:
            loop.remove_reader(watch)
            os.close(watch)
            death.cancel()
            listening.cancel()
            self._watch.cancel()
            self._writer.transport.abort()
        # In a thread: the kernel may take its time to clear a large process away.
        self._fail(await asyncio.to_thread(self._child.death))

    async def _frames(self, decoder: msgspec.msgpack.Decoder[wire.Upward]) -> None:
        try:
            while True:
                (length,) = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
                self._take(decoder.decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _take(self, message: wire.Upward) -> None:
        self._heard = time.monotonic()
        if isinstance(message, wire.Notice):
            try:
                self._on_event(message.event)
            except Exception as error:  # the callback's fault must not cut the line
                loop = asyncio.get_running_loop()
                loop.call_exception_handler({"message": f"callback of {self._child.name}", "exception": error})
            return
        future = self._pending.pop(message.id, None)
        if future is None or future.done():
            return  # its caller has gone away
        if isinstance(message, wire.Answer):
            future.set_result(message.result)
        elif message.refused:
            future.set_exception(wire.Refused(message.error))
        else:
            future.set_exception(CommandFailed(message.error))

    def _fail(self, error: ChildDied) -> None:
        self._down = error
        pending, self._pending = self._pending, {}
        for future in pending.values():
            if not future.done():
                future.set_exception(error)
        if not self._closing:
            self._on_down(error)

    async def close(self, timeout: float) -> None:
        """End the child and reap it. Pending calls raise `ChildDied`; `on_down` is not told."""
        self._closing = True
        await self._child.close(timeout)
        await asyncio.wait({self._task, self._watch}, timeout=2.0)
