"""The parent's side of the children: asyncio clients.

Each client has a socket of its own and may be called from many tasks at once; calls are answered as they are done, so
that a pause or an abort never waits behind a generation or a transfer of another child. When the child dies, every
pending and every later call raises `ChildDied`. So they do when it leaves an order unanswered for longer than its
`Limits` allow, or stands still for as long: it is killed then. An engine that nobody has heard of is asked for a sign
of life.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

from . import answers, commands, wire
from .child import Child, ChildDied
from .config import EngineConfig, TrainerConfig
from .engines import Capabilities
from .limits import Limits

R = TypeVar("R", bound=commands.Message)
DEFAULT = Limits()
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


class Client:
    """What the clients of engines and trainers share."""

    def __init__(self, child: Child, channel: Channel, loaded: answers.Loaded) -> None:
        self.name = child.name
        self.child = child
        self.parameter_bytes = loaded.parameter_bytes
        self.initial_checksum = loaded.checksum
        self._channel = channel
        self._group_s = 0.0  # what a broadcast group allows its members

    async def _ask(self, command: commands.Command, answer: type[R], limit_s: float | None = None) -> R:
        return await self._channel.call(command, answer, limit_s)

    def set_cpus(self, cpus: Iterable[int]) -> None:
        """Bind the child to these cores from now on."""
        self.child.set_cpus(cpus)

    async def checksum(self) -> answers.Digest:
        """Digest of the parameters as they are."""
        return await self._ask(commands.Checksum(), answers.Digest)

    async def count(self) -> answers.Counted:
        """Pacing overruns, CPU time and memory."""
        return await self._ask(commands.Count(), answers.Counted)

    async def reset(self, seed: int) -> None:
        """Back to version 0, as after the start."""
        await self._ask(commands.Reset(seed), answers.Done)

    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join a broadcast group."""
        self._group_s = timeout_s
        limit = timeout_s + self._channel.limits.control_s
        await self._ask(commands.JoinGroup(address, rank, world_size, timeout_s), answers.Done, limit)

    async def leave(self) -> None:
        """Leave the broadcast group."""
        await self._ask(commands.LeaveGroup(), answers.Done)

    async def close(self, timeout: float = 5.0) -> None:
        """End the child and reap it."""
        await self._channel.close(timeout)


async def launch(
    name: str,
    module: str,
    config: msgspec.Struct,
    run_dir: Path,
    interpreter: str,
    cpus: Iterable[int] | None,
    on_event: Callable[[answers.Event], None],
    on_down: Callable[[ChildDied], None],
    environment: Mapping[str, str] | None,
    limits: Limits,
) -> tuple[Child, Channel, answers.Loaded]:
    """Start a child and load it."""
    child = Child.start(name, module, run_dir, interpreter=interpreter, cpus=cpus, environment=environment)
    channel = await Channel.open(child, on_event, on_down, limits)
    try:
        loaded = await channel.call(commands.Load(msgspec.to_builtins(config)), answers.Loaded, limits.start_s)
    except BaseException:
        await channel.close(0.0)
        raise
    child.look()
    return child, channel, loaded


def ignore(_: object) -> None:
    """A callback for who doesn't care."""


class EngineClient(Client):
    """An engine; see `engines.Engine` for the contract."""

    def __init__(self, child: Child, channel: Channel, loaded: answers.Loaded) -> None:
        super().__init__(child, channel, loaded)
        channel.pinged = True
        self.capabilities = msgspec.convert(loaded.capabilities, Capabilities)

    @classmethod
    async def start(
        cls,
        name: str,
        config: EngineConfig,
        run_dir: Path,
        *,
        module: str = "rlsched.real.engines.transformers",
        interpreter: str = sys.executable,
        cpus: Iterable[int] | None = None,
        environment: Mapping[str, str] | None = None,
        on_ended: Callable[[answers.Ended], None] = ignore,
        on_down: Callable[[ChildDied], None] = ignore,
        limits: Limits = DEFAULT,
    ) -> Self:
        """Start an engine child and wait until it is ready. Callbacks are called in the event loop, in order."""

        def on_event(event: answers.Event) -> None:
            if isinstance(event, answers.Ended):
                on_ended(event)

        launched = await launch(
            name, module, config, run_dir, interpreter, cpus, on_event, on_down, environment, limits
        )
        return cls(*launched)

    async def submit(self, rollout: str, tokens: list[int], max_new_tokens: int, *, forced: bool = True) -> None:
        """Queue a request; `Refused` if it can never fit. Its end is told to `on_ended`."""
        await self._ask(commands.Submit(rollout, tokens, max_new_tokens, forced), answers.Done)

    async def abort(self, rollouts: Iterable[str] | None = None) -> answers.Aborted:
        """End these requests (None: all); `on_ended` has been told their tokens when this returns."""
        chosen = None if rollouts is None else list(rollouts)
        return await self._ask(commands.Abort(chosen), answers.Aborted)

    async def pause(self, mode: commands.PauseMode = "keep") -> answers.Progress:
        """Stand still at the next step boundary; `mode` says what becomes of live requests."""
        return await self._ask(commands.Pause(mode), answers.Progress)

    async def resume(self) -> answers.Progress:
        """Go on."""
        return await self._ask(commands.Resume(), answers.Progress)

    async def flush(self, *, recompute: bool = False) -> answers.Flushed:
        """Drop KV; with `recompute` live requests go back to the queue and compute theirs anew."""
        return await self._ask(commands.Flush(recompute), answers.Flushed)

    async def sleep(self, level: Literal[1, 2]) -> answers.Slept:
        """Give memory back."""
        return await self._ask(commands.Sleep(level), answers.Slept)

    async def wake(self, tags: Iterable[str] = ("weights", "kv")) -> answers.Woken:
        """Take memory again."""
        return await self._ask(commands.Wake(list(tags)), answers.Woken)

    async def begin_update(self, version: int) -> None:
        """Open a weight update."""
        await self._ask(commands.BeginUpdate(version), answers.Done)

    async def copy_bucket(self, path: str, size: int, pieces: list[commands.Piece]) -> answers.Moved:
        """Copy one bucket out of shared memory."""
        return await self._ask(commands.CopyBucket(path, size, pieces), answers.Moved)

    async def receive(self, bucket_bytes: int, index: int) -> answers.Moved:
        """Take one bucket from the broadcast group."""
        # The group's own error, if a peer is dead, shall come before the limit.
        limit = self._group_s + self._channel.limits.control_s
        return await self._ask(commands.ReceiveBucket(bucket_bytes, index), answers.Moved, limit)

    async def read_bucket(self, path: str, bucket_bytes: int, index: int) -> answers.Moved:
        """Read one bucket out of a checkpoint file."""
        return await self._ask(commands.ReadBucket(path, bucket_bytes, index), answers.Moved)

    async def end_update(self, version: int) -> answers.Updated:
        """Close the update."""
        return await self._ask(commands.EndUpdate(version), answers.Updated)

    async def trace(self, on: bool) -> list[answers.Step]:
        """Record engine steps, or stop; what was recorded since the last call."""
        return (await self._ask(commands.Trace(on), answers.Steps)).steps


class TrainerClient(Client):
    """A trainer."""

    label = "clipped policy gradient, Adam"

    @classmethod
    async def start(
        cls,
        name: str,
        config: TrainerConfig,
        run_dir: Path,
        *,
        module: str = "rlsched.real.trainer",
        interpreter: str = sys.executable,
        cpus: Iterable[int] | None = None,
        on_phase: Callable[[answers.Phase], None] = ignore,
        on_down: Callable[[ChildDied], None] = ignore,
        limits: Limits = DEFAULT,
    ) -> Self:
        """Start a trainer child and wait until it is ready. Callbacks are called in the event loop, in order."""

        def on_event(event: answers.Event) -> None:
            if isinstance(event, answers.Phase):
                on_phase(event)

        return cls(*await launch(name, module, config, run_dir, interpreter, cpus, on_event, on_down, None, limits))

    async def _ask(self, command: commands.Command, answer: type[R], limit_s: float | None = None) -> R:
        # Whatever it is, it may have to wait behind a training call.
        return await super()._ask(command, answer, self._channel.limits.work_s if limit_s is None else limit_s)

    async def train(self, batch: list[commands.Sample], version: int) -> answers.Trained:
        """One trainer call; afterwards the weights are called `version`."""
        return await self._ask(commands.Train(batch, version), answers.Trained)

    async def evaluate(self, batch: list[commands.Sample]) -> list[list[float]]:
        """The trainer's own log-probabilities of the samples' outputs."""
        return (await self._ask(commands.Evaluate(batch), answers.Evaluated)).logprobs

    async def load(self, parts: Iterable[str]) -> answers.Shifted:
        """Bring "parameters" or "optimizer" to the compute device."""
        return await self._ask(commands.LoadParts(list(parts)), answers.Shifted)

    async def offload(self, parts: Iterable[str]) -> answers.Shifted:
        """Move them to host memory; training is refused until they are loaded again."""
        return await self._ask(commands.OffloadParts(list(parts)), answers.Shifted)

    async def host(self) -> str:
        """Open the place where a broadcast group will meet, as its rank 0; its address."""
        return (await self._ask(commands.HostGroup(), answers.Hosted)).address

    async def offer(self, version: int, bucket_bytes: int) -> answers.Offered:
        """What a push of this version will move; `Refused` if the trainer has another."""
        return await self._ask(commands.Offer(version, bucket_bytes), answers.Offered)

    async def pack(self, path: str, size: int, index: int, version: int) -> answers.Packed:
        """Write one bucket into shared memory."""
        limit = self._channel.limits.control_s  # after an offer it is idle
        return await self._ask(commands.PackBucket(path, size, index, version), answers.Packed, limit)

    async def send(self, bucket_bytes: int, index: int, version: int, ahead: bool = False) -> answers.Moved:
        """Send one bucket to the broadcast group; `ahead`: and pack the next one while it is on its way."""
        limit = self._group_s + self._channel.limits.control_s
        return await self._ask(commands.SendBucket(bucket_bytes, index, version, ahead), answers.Moved, limit)

    async def save(self, path: str, version: int) -> answers.Moved:
        """Write the weights to a checkpoint file, whole or not at all."""
        return await self._ask(commands.SaveCheckpoint(path, version), answers.Moved)
