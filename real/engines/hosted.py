"""An engine whose library steps in processes of its own: the child serves our commands and drives them.

Commands are carried out one after another, in one event loop. A `Driver` has the traffic with the library; transfers
land in a copy of the weights here, and only a complete one goes on into the library.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from .. import answers, commands, wire
from ..child import adopt
from ..config import EngineConfig
from ..memory import resident
from ..pacing import EnginePace, Pacer
from ..weights import Group, Staging
from . import Capabilities
from .family import Family
from .hosted_requests import Request
from .http import HttpError
from .landing import Landing
from .link import Totals

#: Exit code of a child whose library died.
LIBRARY_DIED = 3
DYING_S = 3.0
"""How long the rest of a library may outlive the process of it that died."""


class Driver(Protocol):
    """The traffic with one running library. When a method returns, it has taken effect.

    Every request's end is told before whatever ended it returns.
    """

    paused: bool
    standing: set[str]  # the library's ids of requests that held KV when the pause took effect
    totals: Totals
    steps: list[answers.Step] | None  # added to while it is a list

    @property
    def family(self) -> Family:
        """The library's processes."""

    async def start(self) -> None:
        """Start the library on the landing's weights."""

    async def broken(self) -> None:
        """Wait for the library's end, or for a failure of the traffic with it, and raise it."""

    def look(self) -> Mapping[str, Request]:
        """The live requests by rollout, as they stand after the last step."""

    def submit(self, command: commands.Submit) -> None:
        """Send a request; in a pause it waits."""

    async def abort(self, rollouts: list[str] | None) -> list[str]:
        """End these requests (None: all); which were ended by it."""

    async def pause(self, mode: commands.PauseMode = "keep") -> None:
        """Stand still at a step's end; another mode may follow inside the pause."""

    async def resume(self) -> None:
        """Go on."""

    async def flush(self, recompute: bool) -> bool:
        """Drop all KV, unless live requests hold some; with `recompute` they compute theirs anew."""

    async def sleep(self, parts: list[str]) -> None:
        """Release these parts of the memory, in a pause in which nothing stands."""

    async def wake(self, parts: list[str]) -> None:
        """Take these parts, which sleep."""

    async def install(self, version: int) -> str | None:
        """Bring the landing's weights into the paused library, and see that they are there; how, if there are several
        ways."""


class HostedEngine:
    """State and commands of the engine."""

    def __init__(self, config: EngineConfig, port: wire.Port) -> None:
        self._config = config
        self._port = port
        self._pace = config.pace or EnginePace()
        self._landing, self._driver = self._open()
        self._weights = self._landing.weights
        self._staging = Staging()
        self._group = Group()
        self._forget()

    def _forget(self) -> None:
        self._driver.steps = None
        self._before = self._driver.totals
        self._pacer = Pacer()

    # ------------------------------------------------------------ what a library brings

    def _open(self) -> tuple[Landing, Driver]:
        """Where its weights land, and its driver, not started."""
        raise NotImplementedError

    def capabilities(self) -> Capabilities:
        """What it can do here."""
        raise NotImplementedError

    def _fits(self, command: commands.Submit) -> bool:
        """Whether the library takes a request of that length whole."""
        return len(command.tokens) + command.max_new_tokens <= self.capabilities().max_request_tokens

    async def _alive(self) -> None:
        """Raise if the library's processes live, but no longer step."""

    async def _reseed(self, seed: int) -> None:
        """Sampling begins anew with this seed, if the library can do that."""

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the library on version 0."""
        await self._driver.start()

    async def serve(self, inbox: asyncio.Queue[wire.Call | None]) -> None:
        """Carry commands out until None comes. Raises what killed the library."""
        watching = asyncio.create_task(self._driver.broken())
        working = asyncio.create_task(self._work(inbox))
        done, left = await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        for task in done:
            await task

    async def _work(self, inbox: asyncio.Queue[wire.Call | None]) -> None:
        while (call := await inbox.get()) is not None:
            # The parent binds this process to cores; the library's processes follow.
            self._driver.family.follow()
            try:
                result = await self._execute(call.command)
            except wire.Refused as refusal:
                self._port.send(wire.Failure(call.id, str(refusal), refused=True))
            except Exception as error:
                if isinstance(error, OSError | HttpError):
                    await self._see_whether_it_dies()
                traceback.print_exc()
                self._port.send(wire.Failure(call.id, f"{type(error).__name__}: {error}", refused=False))
            else:
                self._port.send(wire.Answer(call.id, result))

    async def _see_whether_it_dies(self) -> None:
        """Raise what killed the library, if it is dying: the command didn't fail then, the engine did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DYING_S):
                await self._driver.broken()

    def close(self) -> None:
        """End the library."""
        self._driver.family.kill()

    def _tell(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        version = self._landing.version if request.version is None else request.version
        rollout, now = request.command.rollout, time.monotonic_ns()
        self._port.notify(
            answers.Ended(
                rollout, tokens, logprobs, request.reason, version, now, labels=request.labels, cached=request.cached
            )
        )

    # ------------------------------------------------------------ commands

    async def _execute(self, command: commands.Command) -> answers.Result:
        match command:
            case commands.Submit():
                return self._submit(command)
            case commands.Abort(rollouts):
                return answers.Aborted(await self._driver.abort(rollouts))
            case commands.Pause(mode):
                return await self._pause(mode)
            case commands.Resume():
                self._landing.require_usable()
                if self._driver.paused:
                    await self._driver.resume()
                return self._progress()
            case commands.Flush(recompute):
                return answers.Flushed(await self._driver.flush(recompute))
            case commands.Sleep(level):
                return await self._sleep(level)
            case commands.Wake(tags):
                return await self._wake(tags)
            case commands.BeginUpdate(version):
                return self._begin_update(version)
            case commands.CopyBucket(path, size, pieces):
                self._landing.comes("shared")
                return await self._take(lambda: self._weights.copy(self._staging.at(path, size), pieces))
            case commands.ReceiveBucket(bucket_bytes, index):
                pieces = self._weights.buckets(bucket_bytes)[index]
                self._landing.comes("broadcast")
                return await self._take(lambda: self._group.receive(self._weights, pieces))
            case commands.ReadBucket(path, bucket_bytes, index):
                pieces = self._weights.buckets(bucket_bytes)[index]
                self._landing.comes("disk", Path(path))
                return await self._take(lambda: self._weights.read(Path(path), pieces))
            case commands.EndUpdate(version):
                return await self._end_update(version)
            case commands.JoinGroup(address, rank, world_size, timeout_s):
                await asyncio.to_thread(self._group.join, address, rank, world_size, timeout_s)
                return answers.Done()
            case commands.LeaveGroup():
                self._group.leave()
                return answers.Done()
            case commands.Trace(on):
                self._driver.look()
                steps, self._driver.steps = self._driver.steps, [] if on else None
                return answers.Steps(steps or [])
            case commands.Checksum():
                return answers.Digest(self._landing.checksum(), self._landing.version)
            case commands.Ping():
                await self._alive()
                return answers.Done()
            case commands.Count():
                await self._alive()
                return self._count()
            case commands.Reset(seed):
                return await self._reset(seed)
        raise wire.Refused(f"not a command for an engine: {type(command).__name__}")

    def _submit(self, command: commands.Submit) -> answers.Done:
        # Most of these a library would silently shorten, answer late, or die of.
        if command.rollout in self._driver.look():
            raise wire.Refused(f"rollout {command.rollout} is live already")
        if not command.tokens or command.max_new_tokens < 1:
            raise wire.Refused("a request needs at least one token of input and one to generate")
        if not self._fits(command):
            total, most = len(command.tokens) + command.max_new_tokens, self.capabilities().max_request_tokens
            raise wire.Refused(f"{total} tokens of prompt and output exceed {most}")
        if not all(0 <= token < self._config.model.vocab for token in command.tokens):
            raise wire.Refused(f"token out of the vocabulary of {self._config.model.vocab}")
        self._driver.submit(command)
        return answers.Done()

    async def _pause(self, mode: commands.PauseMode) -> answers.Progress:
        modes = self.capabilities().pause_modes
        if mode not in modes:
            raise wire.Refused(f"no pause mode {mode} here, but {', '.join(modes)}")
        if mode != "keep" or not self._driver.paused:
            await self._driver.pause(mode)
        return self._progress()

    async def _sleep(self, level: int) -> answers.Slept:
        self._require_pause()
        if self._driver.standing:
            raise wire.Refused("live requests stand on the KV: abort or retract them first")
        async with self._held(self._pace.sleep.of(level)):
            self._landing.sleep(level)
            before = self._driver.family.rss()
            await self._driver.sleep(sorted(self._landing.asleep))
            after = self._driver.family.rss()
        return answers.Slept(level, before, after, before - after)

    async def _wake(self, tags: list[str]) -> answers.Woken:
        async with self._held(self._pace.wake.of(len(tags))):
            asleep = set(self._landing.asleep)
            self._landing.wake(tags)
            await self._driver.wake(sorted(asleep - self._landing.asleep))
        return answers.Woken(self._landing.awake, self._landing.usable)

    def _begin_update(self, version: int) -> answers.Done:
        self._require_pause()
        self._landing.begin_update(version)
        self._pacer.rest()
        self._pacer.start()
        return answers.Done()

    async def _take(self, copy: Callable[[], int]) -> answers.Moved:
        self._landing.require_update()
        began = time.monotonic_ns()
        copied = await asyncio.to_thread(copy)
        self._landing.received(copied)
        if self._config.pace is not None:
            await asyncio.to_thread(self._pacer.hold, self._pace.bucket.of(copied))
        return answers.Moved(copied, time.monotonic_ns() - began)

    async def _end_update(self, version: int) -> answers.Updated:
        size = self._landing.end_update(version)
        self._landing.usable = False
        async with self._held(self._pace.install.of(size)):
            way = await self._driver.install(version)
        self._landing.usable = True
        return answers.Updated(version, size, self._landing.checksum(), self._progress().live, way or "")

    async def _reset(self, seed: int) -> answers.Done:
        if live := self._driver.look():
            raise wire.Refused(f"{len(live)} requests are live")
        if self._landing.asleep:
            await self._wake(sorted(self._landing.asleep))
        self._group.leave()
        await self._driver.pause()
        self._landing.forget()
        await self._driver.install(0)
        await self._driver.flush(recompute=True)
        await self._reseed(seed)
        await self._driver.resume()
        self._forget()
        return answers.Done()

    # ------------------------------------------------------------ answers and conditions

    def _require_pause(self) -> None:
        if not self._driver.paused:
            raise wire.Refused("only inside a pause")

    @asynccontextmanager
    async def _held(self, cost: int) -> AsyncIterator[None]:
        self._pacer.rest()  # an update that broke off may have left a chain
        self._pacer.start()
        yield
        if self._config.pace is not None:
            await asyncio.to_thread(self._pacer.hold, cost)
        self._pacer.rest()

    def _progress(self) -> answers.Progress:
        live = {rollout: request.made for rollout, request in self._driver.look().items()}
        return answers.Progress(live, self._landing.version)

    def _count(self) -> answers.Counted:
        self._driver.look()
        steps, before, work = self._driver.totals, self._before, self._pacer
        return answers.Counted(
            held=steps.held - before.held + work.held,
            declared_ns=steps.declared_ns - before.declared_ns + work.declared_ns,
            overruns=steps.overruns - before.overruns + work.overruns,
            overrun_ns=steps.overrun_ns - before.overrun_ns + work.overrun_ns,
            cpu_ns=time.process_time_ns() + self._driver.family.cpu_ns(),
            rss=resident() + self._driver.family.rss(),
        )

    def loaded(self) -> answers.Loaded:
        """The answer to `Load`."""
        able = msgspec.to_builtins(self.capabilities())
        return answers.Loaded(able, self._weights.nbytes, self._weights.checksum())


async def run(kind: type[HostedEngine], port: wire.Port) -> int:
    """Serve one parent until it closes the socket; the exit code."""
    first = await asyncio.to_thread(port.receive)
    if first is None or not isinstance(first.command, commands.Load):
        print("the first command must be Load", file=sys.stderr)
        return 2
    engine = kind(msgspec.convert(first.command.config, EngineConfig), port)
    await engine.start()
    inbox: asyncio.Queue[wire.Call | None] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        while (call := port.receive()) is not None:
            loop.call_soon_threadsafe(inbox.put_nowait, call)
        loop.call_soon_threadsafe(inbox.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    try:
        try:
            port.send(wire.Answer(first.id, engine.loaded()))
            await engine.serve(inbox)
        finally:
            engine.close()
    except Exception as error:
        # After all that the library has to say of its end: the last line of stderr is what is told of an engine.
        traceback.print_exc()
        port.notify(answers.Fatal(f"{type(error).__name__}: {error}"))
        return LIBRARY_DIED
    return 0


def main(kind: type[HostedEngine]) -> None:
    """Be the child, and leave without waiting for a thread that reads."""
    code = asyncio.run(run(kind, wire.Port(adopt())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
