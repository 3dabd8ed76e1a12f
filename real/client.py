"""The parent's side of the children: asyncio clients.

Each client has a socket of its own and may be called from many tasks at once; calls are answered as they are done, so
that a pause or an abort never waits behind a generation or a transfer of another child. When the child dies, every
pending and every later call raises `ChildDied`; see `channel`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Literal, Self, TypeVar

import msgspec

from . import answers, commands
from .channel import Channel
from .child import Child, ChildDied
from .config import EngineConfig, TrainerConfig
from .engines import Capabilities
from .limits import Limits

R = TypeVar("R", bound=commands.Message)
DEFAULT = Limits()


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
        # Whoever is waited for may have long to go.
        limit_s = self._channel.limits.work_s if mode == "wait" else None
        return await self._ask(commands.Pause(mode), answers.Progress, limit_s)

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
