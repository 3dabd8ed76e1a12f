"""SGLang as an engine: a child process that starts a real SGLang server and drives it over HTTP.

It serves the commands of the embedded engine, one after another, in one event loop; `sglang_driver` has the traffic
with the server. Where SGLang differs:

* A pause is SGLang's `in_place`: requests and KV stay. Submitted meanwhile, a request waits in this process.
* An abort lets a running request do one more step, whose token counts. Inside a pause nothing steps: there all running
  requests go back to SGLang's queue first (`retract`), and those not aborted compute their KV anew when it goes on.
* An update lands in a copy of the weights here; the complete one goes into the server, whose parameters are then
  compared with the copy. The prefix cache is off, so that no stale prefix is left behind. KV that live requests hold
  stays old until they are flushed with `recompute`, as in the embedded engine.
* On a CPU SGLang's sleep frees nothing. It is asked for all the same, so that the order of calls is the one on a GPU,
  and a level 2 sleep still wants a complete update; `Capabilities.sleep_frees` is empty, and `Slept` is measured.
* Sampling is seeded at the start alone: SGLang's CPU sampler can't be seeded anew by `Reset`.
* Versions are this child's own, from the updates that it made. SGLang's label of each token is compared with them, and
  where they differ a line on stderr says so.

Run as `python -m rlsched.real.engines.sglang --fd N --parent PID` by the interpreter of SGLang's own environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import msgspec

from .. import answers, commands, wire
from ..child import adopt
from ..config import EngineConfig
from ..memory import resident
from ..pacing import EnginePace, Pacer
from ..weights import Group, Staging
from . import Capabilities
from .sglang_driver import Driver
from .sglang_http import HttpError
from .sglang_landing import Landing
from .sglang_requests import Request

#: Exit code of a child whose server died.
SERVER_DIED = 3
DYING_S = 3.0
"""How long the rest of a server may outlive the process of it that died."""


class SglangEngine:
    """State and commands of the engine."""

    #: Whether requests share the KV of equal prefixes; see `sglang_sharing`.
    sharing: ClassVar[bool] = False

    def __init__(self, config: EngineConfig, port: wire.Port) -> None:
        self._config = config
        self._port = port
        self._pace = config.pace or EnginePace()
        self._landing = Landing(config.model)
        self._weights = self._landing.weights
        self._driver = Driver(config, self._landing, self._tell)
        self._staging = Staging()
        self._group = Group()
        self._forget()

    def _forget(self) -> None:
        self._driver.steps = None
        self._before = self._driver.totals
        self._pacer = Pacer()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the server on version 0."""
        await self._driver.start(self.sharing)

    async def serve(self, inbox: asyncio.Queue[wire.Call | None]) -> None:
        """Carry commands out until None comes. Raises what killed the server."""
        watching = asyncio.create_task(self._driver.broken())
        working = asyncio.create_task(self._work(inbox))
        done, left = await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        for task in left:
            task.cancel()
        for task in done:
            await task

    async def _work(self, inbox: asyncio.Queue[wire.Call | None]) -> None:
        while (call := await inbox.get()) is not None:
            # The parent binds this process to cores; the server's processes follow.
            self._driver.server.follow()
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
        """Raise what killed the server, if it is dying: the command didn't fail then, the engine did."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(DYING_S):
                await self._driver.broken()

    def close(self) -> None:
        """End the server."""
        self._driver.server.kill()

    def _tell(self, request: Request, tokens: list[int], logprobs: list[float]) -> None:
        version = self._landing.version if request.version is None else request.version
        rollout, now = request.command.rollout, time.monotonic_ns()
        self._port.notify(answers.Ended(rollout, tokens, logprobs, request.reason, version, now))

    # ------------------------------------------------------------ commands

    async def _execute(self, command: commands.Command) -> answers.Result:
        match command:
            case commands.Submit():
                return self._submit(command)
            case commands.Abort(rollouts):
                return answers.Aborted(await self._driver.abort(rollouts))
            case commands.Pause():
                if not self._driver.paused:
                    await self._driver.pause()
                return self._progress()
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
                return await self._take(lambda: self._weights.copy(self._staging.at(path, size), pieces))
            case commands.ReceiveBucket(bucket_bytes, index):
                pieces = self._weights.buckets(bucket_bytes)[index]
                return await self._take(lambda: self._group.receive(self._weights, pieces))
            case commands.ReadBucket(path, bucket_bytes, index):
                pieces = self._weights.buckets(bucket_bytes)[index]
                return await self._take(lambda: self._weights.read(Path(path), pieces))
            case commands.EndUpdate(version):
                return await self._end_update(version)
            case commands.JoinGroup(address, rank, world_size, timeout_s):
                await asyncio.to_thread(self._group.join, address, rank, world_size, timeout_s)
                return answers.Done()
            case commands.LeaveGroup():
                self._group.leave()
                return answers.Done()
            case commands.Ping():
                await self._driver.ping()
                return answers.Done()
            case commands.Trace(on):
                self._driver.look()
                steps, self._driver.steps = self._driver.steps, [] if on else None
                return answers.Steps(steps or [])
            case commands.Checksum():
                return answers.Digest(self._landing.checksum(), self._landing.version)
            case commands.Count():
                return self._count()
            case commands.Reset():
                return await self._reset()
        raise wire.Refused(f"not a command for an engine: {type(command).__name__}")

    def _submit(self, command: commands.Submit) -> answers.Done:
        total = len(command.tokens) + command.max_new_tokens
        # Most of these SGLang would silently shorten, answer late, or die of.
        if command.rollout in self._driver.look():
            raise wire.Refused(f"rollout {command.rollout} is live already")
        if not command.tokens or command.max_new_tokens < 1:
            raise wire.Refused("a request needs at least one token of input and one to generate")
        if total > self._max_request_tokens or len(command.tokens) >= self._max_input_tokens:
            raise wire.Refused(f"{total} tokens of prompt and output exceed {self._max_request_tokens}")
        if not all(0 <= token < self._config.model.vocab for token in command.tokens):
            raise wire.Refused(f"token out of the vocabulary of {self._config.model.vocab}")
        self._driver.submit(command)
        return answers.Done()

    async def _sleep(self, level: int) -> answers.Slept:
        self._require_pause()
        if self._driver.standing:
            raise wire.Refused("live requests stand on the KV: abort or retract them first")
        async with self._held(self._pace.sleep.of(level)):
            self._landing.sleep(level)
            before = self._driver.server.rss()
            await self._driver.sleep(sorted(self._landing.asleep))
            after = self._driver.server.rss()
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
        # The way from here into the server is one bucket more, of all bytes.
        async with self._held(self._pace.bucket.of(size)):
            await self._driver.install(version)
        self._landing.usable = True
        return answers.Updated(version, size, self._landing.checksum(), self._progress().live)

    async def _reset(self) -> answers.Done:
        if live := self._driver.look():
            raise wire.Refused(f"{len(live)} requests are live")
        if self._landing.asleep:
            await self._wake(sorted(self._landing.asleep))
        self._group.leave()
        await self._driver.pause()
        self._landing.forget()
        await self._driver.install(0)
        await self._driver.flush(recompute=True)
        await self._driver.resume()
        self._forget()
        return answers.Done()

    # ------------------------------------------------------------ answers and conditions

    @property
    def _max_input_tokens(self) -> int:
        return int(self._driver.info["max_req_input_len"])

    @property
    def _max_request_tokens(self) -> int:
        info = self._driver.info
        # SGLang cuts an output short so that one position stays free; five less than all is its bound of the input.
        positions = self._max_input_tokens + 4
        # A request that it reckons to need more, with a page for the input's end and one to spare, waits for ever.
        return min(positions, int(info["max_total_num_tokens"]) - 2 * int(info["page_size"]) - 2)

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
            cpu_ns=time.process_time_ns() + self._driver.server.cpu_ns(),
            rss=resident() + self._driver.server.rss(),
        )

    def loaded(self) -> answers.Loaded:
        """The answer to `Load`."""
        info = self._driver.info
        capabilities = Capabilities(
            engine="sglang",
            version=info["version"],
            device=info["device"],
            max_request_tokens=self._max_request_tokens,
            kv_tokens=info["max_total_num_tokens"],
            page_size=info["page_size"],
            max_requests=info["max_running_requests"],
            max_batch_tokens=info["chunked_prefill_size"],
            pause_modes=("keep",),
            flush_live=True,
            sleep_levels=self._landing.levels,
            sleep_frees=("weights", "kv") if info["enable_memory_saver"] else (),
            wake_tags=("weights", "kv"),
            transports=("shared", "broadcast", "disk"),
            in_place_update=True,
            abort_partials=True,
            step_trace=True,
        )
        return answers.Loaded(msgspec.to_builtins(capabilities), self._weights.nbytes, self._weights.checksum())


async def run(kind: type[SglangEngine], port: wire.Port) -> int:
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
        port.send(wire.Answer(first.id, engine.loaded()))
        await engine.serve(inbox)
    except Exception as error:
        traceback.print_exc()
        port.notify(answers.Fatal(f"{type(error).__name__}: {error}"))
        return SERVER_DIED
    finally:
        engine.close()
    return 0


def main(kind: type[SglangEngine] = SglangEngine) -> None:
    """Be the child, and leave without waiting for a thread that reads."""
    code = asyncio.run(run(kind, wire.Port(adopt())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
