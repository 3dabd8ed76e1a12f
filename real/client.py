"""The parent's side of the children: asyncio clients.

Each client has a socket of its own and may be called from many tasks at once; calls are answered as they are done, so
that a pause or an abort never waits behind a generation or a transfer of another child. When the child dies, every
pending and every later call raises `ChildDied`.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

from . import answers, commands, wire
from .child import Child, ChildDied
from .config import EngineConfig, TrainerConfig
from .engines import Capabilities

R = TypeVar("R", bound=commands.Message)


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
    ) -> None:
        self._child = child
        self._reader = reader
        self._writer = writer
        self._on_event = on_event
        self._on_down = on_down
        self._pending: dict[int, asyncio.Future[answers.Result]] = {}
        self._next = 0
        self._down: ChildDied | None = None
        self._closing = False
        self._task = asyncio.create_task(self._listen(), name=f"listen to {child.name}")

    @classmethod
    async def open(
        cls,
        child: Child,
        on_event: Callable[[answers.Event], None],
        on_down: Callable[[ChildDied], None],
    ) -> Channel:
        """Take over the parent's end of the child's socket."""
        reader, writer = await asyncio.open_connection(sock=child.socket)
        return cls(child, reader, writer, on_event, on_down)

    async def call(self, command: commands.Command, answer: type[R]) -> R:
        """Send a command and wait for its answer. Abandoning the wait does not take the command back."""
        if self._down is not None:
            raise self._down
        self._next += 1
        future = asyncio.get_running_loop().create_future()
        self._pending[self._next] = future
        self._writer.write(wire.frame(wire.Call(self._next, command)))
        result = await future
        if not isinstance(result, answer):
            raise CommandFailed(f"{type(command).__name__} was answered by {type(result).__name__}")
        return result

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
        self._fail(self._child.death())

    async def _frames(self, decoder: msgspec.msgpack.Decoder[wire.Upward]) -> None:
        try:
            while True:
                (length,) = wire.HEADER.unpack(await self._reader.readexactly(wire.HEADER.size))
                self._take(decoder.decode(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError):
            return

    def _take(self, message: wire.Upward) -> None:
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
        self._writer.close()
        await asyncio.wait({self._task}, timeout=2.0)


class Client:
    """What the clients of engines and trainers share."""

    def __init__(self, child: Child, channel: Channel, loaded: answers.Loaded) -> None:
        self.name = child.name
        self.child = child
        self.parameter_bytes = loaded.parameter_bytes
        self.initial_checksum = loaded.checksum
        self._channel = channel

    def set_cpus(self, cpus: Iterable[int]) -> None:
        """Bind the child to these cores from now on."""
        self.child.set_cpus(cpus)

    async def checksum(self) -> answers.Digest:
        """Digest of the parameters as they are."""
        return await self._channel.call(commands.Checksum(), answers.Digest)

    async def count(self) -> answers.Counted:
        """Pacing overruns, CPU time and memory."""
        return await self._channel.call(commands.Count(), answers.Counted)

    async def reset(self, seed: int) -> None:
        """Back to version 0, as after the start."""
        await self._channel.call(commands.Reset(seed), answers.Done)

    async def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Join a broadcast group."""
        await self._channel.call(commands.JoinGroup(address, rank, world_size, timeout_s), answers.Done)

    async def leave(self) -> None:
        """Leave the broadcast group."""
        await self._channel.call(commands.LeaveGroup(), answers.Done)

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
    environment: Mapping[str, str] | None = None,
) -> tuple[Child, Channel, answers.Loaded]:
    """Start a child and load it."""
    child = Child.start(name, module, run_dir, interpreter=interpreter, cpus=cpus, environment=environment)
    channel = await Channel.open(child, on_event, on_down)
    try:
        loaded = await channel.call(commands.Load(msgspec.to_builtins(config)), answers.Loaded)
    except BaseException:
        await channel.close(0.0)
        raise
    return child, channel, loaded


def ignore(_: object) -> None:
    """A callback for who doesn't care."""


class EngineClient(Client):
    """An engine; see `engines.Engine` for the contract."""

    def __init__(self, child: Child, channel: Channel, loaded: answers.Loaded) -> None:
        super().__init__(child, channel, loaded)
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
    ) -> EngineClient:
        """Start an engine child and wait until it is ready. Callbacks are called in the event loop, in order."""

        def on_event(event: answers.Event) -> None:
            if isinstance(event, answers.Ended):
                on_ended(event)

        return cls(*await launch(name, module, config, run_dir, interpreter, cpus, on_event, on_down, environment))

    async def submit(self, rollout: str, tokens: list[int], max_new_tokens: int, *, forced: bool = True) -> None:
        """Queue a request; `Refused` if it can never fit. Its end is told to `on_ended`."""
        await self._channel.call(commands.Submit(rollout, tokens, max_new_tokens, forced), answers.Done)

    async def abort(self, rollouts: Iterable[str] | None = None) -> answers.Aborted:
        """End these requests (None: all); `on_ended` has been told their tokens when this returns."""
        chosen = None if rollouts is None else list(rollouts)
        return await self._channel.call(commands.Abort(chosen), answers.Aborted)

    async def pause(self, mode: commands.PauseMode = "keep") -> answers.Progress:
        """Stand still at the next step boundary; `mode` says what becomes of live requests."""
        return await self._channel.call(commands.Pause(mode), answers.Progress)

    async def resume(self) -> answers.Progress:
        """Go on."""
        return await self._channel.call(commands.Resume(), answers.Progress)

    async def flush(self, *, recompute: bool = False) -> answers.Flushed:
        """Drop KV; with `recompute` live requests go back to the queue and compute theirs anew."""
        return await self._channel.call(commands.Flush(recompute), answers.Flushed)

    async def sleep(self, level: Literal[1, 2]) -> answers.Slept:
        """Give memory back."""
        return await self._channel.call(commands.Sleep(level), answers.Slept)

    async def wake(self, tags: Iterable[str] = ("weights", "kv")) -> answers.Woken:
        """Take memory again."""
        return await self._channel.call(commands.Wake(list(tags)), answers.Woken)

    async def begin_update(self, version: int) -> None:
        """Open a weight update."""
        await self._channel.call(commands.BeginUpdate(version), answers.Done)

    async def copy_bucket(self, path: str, size: int, pieces: list[commands.Piece]) -> answers.Moved:
        """Copy one bucket out of shared memory."""
        return await self._channel.call(commands.CopyBucket(path, size, pieces), answers.Moved)

    async def receive(self, bucket_bytes: int, index: int) -> answers.Moved:
        """Take one bucket from the broadcast group."""
        return await self._channel.call(commands.ReceiveBucket(bucket_bytes, index), answers.Moved)

    async def read_bucket(self, path: str, bucket_bytes: int, index: int) -> answers.Moved:
        """Read one bucket out of a checkpoint file."""
        return await self._channel.call(commands.ReadBucket(path, bucket_bytes, index), answers.Moved)

    async def end_update(self, version: int) -> answers.Updated:
        """Close the update."""
        return await self._channel.call(commands.EndUpdate(version), answers.Updated)

    async def trace(self, on: bool) -> list[answers.Step]:
        """Record engine steps, or stop; what was recorded since the last call."""
        return (await self._channel.call(commands.Trace(on), answers.Steps)).steps


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
    ) -> Self:
        """Start a trainer child and wait until it is ready. Callbacks are called in the event loop, in order."""

        def on_event(event: answers.Event) -> None:
            if isinstance(event, answers.Phase):
                on_phase(event)

        return cls(*await launch(name, module, config, run_dir, interpreter, cpus, on_event, on_down))

    async def train(self, batch: list[commands.Sample], version: int) -> answers.Trained:
        """One trainer call; afterwards the weights are called `version`."""
        return await self._channel.call(commands.Train(batch, version), answers.Trained)

    async def evaluate(self, batch: list[commands.Sample]) -> list[list[float]]:
        """The trainer's own log-probabilities of the samples' outputs."""
        return (await self._channel.call(commands.Evaluate(batch), answers.Evaluated)).logprobs

    async def load(self, parts: Iterable[str]) -> answers.Shifted:
        """Bring "parameters" or "optimizer" to the compute device."""
        return await self._channel.call(commands.LoadParts(list(parts)), answers.Shifted)

    async def offload(self, parts: Iterable[str]) -> answers.Shifted:
        """Move them to host memory; training is refused until they are loaded again."""
        return await self._channel.call(commands.OffloadParts(list(parts)), answers.Shifted)

    async def host(self) -> str:
        """Open the place where a broadcast group will meet, as its rank 0; its address."""
        return (await self._channel.call(commands.HostGroup(), answers.Hosted)).address

    async def offer(self, version: int, bucket_bytes: int) -> answers.Offered:
        """What a push of this version will move; `Refused` if the trainer has another."""
        return await self._channel.call(commands.Offer(version, bucket_bytes), answers.Offered)

    async def pack(self, path: str, size: int, index: int, version: int) -> answers.Packed:
        """Write one bucket into shared memory."""
        return await self._channel.call(commands.PackBucket(path, size, index, version), answers.Packed)

    async def send(self, bucket_bytes: int, index: int, version: int) -> answers.Moved:
        """Send one bucket to the broadcast group."""
        return await self._channel.call(commands.SendBucket(bucket_bytes, index, version), answers.Moved)

    async def save(self, path: str, version: int) -> answers.Moved:
        """Write the weights to a checkpoint file, whole or not at all."""
        return await self._channel.call(commands.SaveCheckpoint(path, version), answers.Moved)
