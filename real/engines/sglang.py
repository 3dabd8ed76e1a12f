"""SGLang as an engine: a child process that starts a real SGLang server and drives it over HTTP.

It serves the commands of the embedded engine, one after another; only requests run beside them, each a `/generate` that
is answered when the request ends. What SGLang does not say in time, or says too early, comes past HTTP from a hook in
its scheduler (see `sglang_link`): steps, pauses that have taken effect, requests taken in.

* A pause is SGLang's `in_place`; requests and KV stay. Submitted meanwhile, a request waits here.
* An abort lets a running request do one more step, whose token counts. Inside a pause nothing steps: there all running
  requests go back to SGLang's queue first (`retract`), and those not aborted compute their KV anew when it goes on.
* The server's prefix cache is off: an update leaves no stale prefix behind. KV that live requests hold stays old until
  they are flushed with `recompute`, as in the embedded engine.
* On a CPU SGLang's sleep frees nothing. It is asked for all the same, so that the order of calls is the one on a GPU,
  and a level 2 sleep still wants a complete update; `Capabilities.sleep_frees` is empty, and `Slept` is measured.
* Versions are this child's own, from the updates that it made. SGLang's label of each token is compared with them, and
  where they differ a line on stderr says so.

Run as `python -m rlsched.real.engines.sglang --fd N --parent PID` by the interpreter of SGLang's own environment.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import msgspec

from .. import answers, commands, wire
from ..child import adopt
from ..config import EngineConfig
from ..memory import resident
from ..pacing import EnginePace, Pacer
from ..weights import Group, Staging
from . import Capabilities
from .sglang_landing import Landing
from .sglang_link import LINK, Link, Record, Stepped, Stood, Taken, Terms, Totals
from .sglang_process import Server
from .sglang_requests import Request, Requests

#: Exit code of a child whose server died.
SERVER_DIED = 3
TAGS = {"weights": "weights", "kv": "kv_cache"}
"""Parts of the memory, as SGLang calls them."""


class SglangEngine:
    """State and commands of the engine; all in one event loop."""

    #: Whether requests share the KV of equal prefixes; see `sglang_sharing`.
    sharing: ClassVar[bool] = False

    def __init__(self, config: EngineConfig, port: wire.Port) -> None:
        self._config = config
        self._port = port
        self._pace = config.pace or EnginePace()
        self._landing = Landing(config.model)
        self._staging = Staging()
        self._group = Group()
        self._link = Link(self._on_record)
        self._requests = Requests()
        self._server: Server
        self._info: dict[str, Any] = {}
        self._paused = False
        self._standing: set[str] = set()  # ids of requests that held KV when the pause began; empty after a retract
        self._stood = 0  # pauses that took effect
        self._totals = Totals()
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._forget()

    def _forget(self) -> None:
        self._steps: list[answers.Step] | None = None
        self._before = self._totals
        self._work_pacer = Pacer()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Start the server on version 0."""
        step = None if self._config.pace is None else self._pace.step
        terms = msgspec.json.encode(Terms(self._link.address, step)).decode()
        with TemporaryDirectory(prefix="rlsched-sglang-") as folder:
            # Without a tokenizer: nothing but token ids comes and goes.
            self._landing.model.save_pretrained(folder)
            self._server = await Server.start(self._arguments(folder), {LINK: terms}, self._config.threads)
        try:
            self._info = await self._server.get("/server_info")
            await self._compare()
        except BaseException:
            self.close()
            raise

    def _arguments(self, folder: str) -> list[str]:
        config = self._config
        chosen = {
            "model-path": folder,
            "device": config.device,
            "attention-backend": "torch_native",
            "sampling-backend": "pytorch",
            "grammar-backend": "none",
            "dtype": config.model.dtype,
            "max-total-tokens": config.kv_blocks * config.page_size,
            "page-size": config.page_size,
            "max-running-requests": config.max_requests,
            "chunked-prefill-size": config.max_batch_tokens,
            "max-prefill-tokens": config.max_batch_tokens,
            "random-seed": config.seed,
            "weight-version": 0,
            "log-level": "warning",
        }
        # Overlapped, a step's tokens would come out only after the next one has begun.
        switches = ["skip-tokenizer-init", "skip-server-warmup", "sleep-on-idle", "disable-overlap-schedule"]
        if not self.sharing:
            switches.append("disable-radix-cache")
        valued = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
        return [*valued, *(f"--{name}" for name in switches)]

    async def serve(self, inbox: asyncio.Queue[wire.Call | None]) -> None:
        """Carry commands out until None comes. Raises what killed the server."""
        watch = asyncio.ensure_future(self._server.ended())
        try:
            while True:
                incoming = asyncio.ensure_future(inbox.get())
                await asyncio.wait({incoming, watch, self._fault}, return_when=asyncio.FIRST_COMPLETED)
                if not incoming.done():
                    incoming.cancel()
                    break
                call = incoming.result()
                if call is None:
                    return
                answering = asyncio.ensure_future(self._answer(call))
                await asyncio.wait({answering, watch, self._fault}, return_when=asyncio.FIRST_COMPLETED)
                if not answering.done():
                    answering.cancel()
                    break
            if self._fault.done():
                self._fault.result()
            raise RuntimeError(f"the SGLang server ended: exit code {await watch}")
        finally:
            watch.cancel()

    def close(self) -> None:
        """End the server."""
        self._server.kill()

    async def _answer(self, call: wire.Call) -> None:
        self._server.follow()
        try:
            result = await self._execute(call.command)
        except wire.Refused as refusal:
            self._port.send(wire.Failure(call.id, str(refusal), refused=True))
        except Exception as error:
            traceback.print_exc()
            self._port.send(wire.Failure(call.id, f"{type(error).__name__}: {error}", refused=False))
        else:
            self._port.send(wire.Answer(call.id, result))

    # ------------------------------------------------------------ what the scheduler tells

    def _on_record(self, record: Record) -> None:
        match record:
            case Taken(rid):
                self._requests.taken(rid)
            case Stepped(step, made, totals):
                self._totals = totals
                self._requests.stepped(made, self._landing.version)
                if self._steps is not None:
                    self._steps.append(step)
            case Stood(standing):
                self._standing = set(standing)
                self._stood += 1

    # ------------------------------------------------------------ commands

    async def _execute(self, command: commands.Command) -> answers.Result:
        match command:
            case commands.Submit():
                return self._submit(command)
            case commands.Abort(rollouts):
                return await self._abort(rollouts)
            case commands.Pause():
                if not self._paused:
                    await self._pause("in_place")
                return self._progress()
            case commands.Resume():
                return await self._resume()
            case commands.Flush(recompute):
                return answers.Flushed(await self._flush(recompute))
            case commands.Sleep(level):
                return await self._sleep(level)
            case commands.Wake(tags):
                return await self._wake(tags)
            case commands.BeginUpdate(version):
                return self._begin_update(version)
            case commands.CopyBucket(path, size, pieces):
                weights = self._landing.weights
                return await self._take(lambda: weights.copy(self._staging.at(path, size), pieces))
            case commands.ReceiveBucket(bucket_bytes, index):
                pieces = self._landing.weights.buckets(bucket_bytes)[index]
                return await self._take(lambda: self._group.receive(self._landing.weights, pieces))
            case commands.ReadBucket(path, bucket_bytes, index):
                pieces = self._landing.weights.buckets(bucket_bytes)[index]
                return await self._take(lambda: self._landing.weights.read(Path(path), pieces))
            case commands.EndUpdate(version):
                return await self._end_update(version)
            case commands.JoinGroup(address, rank, world_size, timeout_s):
                await asyncio.to_thread(self._group.join, address, rank, world_size, timeout_s)
                return answers.Done()
            case commands.LeaveGroup():
                self._group.leave()
                return answers.Done()
            case commands.Trace(on):
                self._link.drain()
                steps, self._steps = self._steps, [] if on else None
                return answers.Steps(steps or [])
            case commands.Checksum():
                return answers.Digest(self._landing.checksum(), self._landing.version)
            case commands.Count():
                return self._count()
            case commands.Reset():
                return await self._reset()
        raise wire.Refused(f"not a command for an engine: {type(command).__name__}")

    # ------------------------------------------------------------ requests

    def _submit(self, command: commands.Submit) -> answers.Done:
        total = len(command.tokens) + command.max_new_tokens
        # Most of these SGLang would silently shorten, answer late, or die of.
        if command.rollout in self._requests.live:
            raise wire.Refused(f"rollout {command.rollout} is live already")
        if not command.tokens or command.max_new_tokens < 1:
            raise wire.Refused("a request needs at least one token of input and one to generate")
        if total > self._max_request_tokens:
            raise wire.Refused(f"{total} tokens of prompt and output exceed {self._max_request_tokens}")
        if not all(0 <= token < self._config.model.vocab for token in command.tokens):
            raise wire.Refused(f"token out of the vocabulary of {self._config.model.vocab}")
        request = self._requests.add(command)
        if not self._paused:
            self._send(request)
        return answers.Done()

    def _send(self, request: Request) -> None:
        request.sent = asyncio.create_task(self._generate(request))

    async def _generate(self, request: Request) -> None:
        """One request, from here into the server and back."""
        try:
            answer = await self._server.post("/generate", request.body(self._config.temperature, self._config.eos))
            tokens: list[int] = answer["output_ids"]
            # The record of its last step may still be on the way.
            async with asyncio.timeout(10):
                await self._link.until(lambda: request.made >= len(tokens))
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not self._fault.done():
                self._fault.set_exception(error)
            return
        self._end(request, answer)

    def _end(self, request: Request, answer: Any) -> None:
        meta = answer["meta_info"]
        tokens: list[int] = answer["output_ids"]
        logprobs = [float(entry[0]) for entry in meta.get("output_token_logprobs", [])]
        reason = meta["finish_reason"]["type"]
        if reason == "stop" and (request.command.forced or tokens[-1] != self._config.eos):
            reason = "length"
        name = request.command.rollout
        if not request.made == len(tokens) == len(logprobs):
            print(f"{name}: {request.made} made, {len(tokens)} came, {len(logprobs)} logprobs", file=sys.stderr)
        spans = [(int(s["version"]), int(s["end"]) - int(s["start"])) for s in meta.get("weight_versions") or ()]
        if tokens and [s for s in spans if s[1]] != request.spans():
            print(f"{name}: SGLang says {spans}, installed was {request.spans()}", file=sys.stderr)
        self._tell(request, tokens, logprobs, reason)

    def _tell(self, request: Request, tokens: list[int], logprobs: list[float], reason: str) -> None:
        self._requests.remove(request)
        version = self._landing.version if request.version is None else request.version
        rollout, now = request.command.rollout, time.monotonic_ns()
        self._port.notify(answers.Ended(rollout, tokens, logprobs, reason, version, now))

    async def _abort(self, rollouts: list[str] | None) -> answers.Aborted:
        live = self._requests.live
        chosen = [r for r in live.values() if rollouts is None or r.command.rollout in set(rollouts)]
        sent = [r for r in chosen if r.sent is not None]
        for request in chosen:
            if request.sent is None:
                self._tell(request, [], [], "abort")
        await self._settle(sent)
        sent = [r for r in sent if r.rid in self._requests]
        if self._paused and any(r.rid in self._standing for r in sent):
            await self._pause("retract")
        if sent and len(sent) == len(self._requests.sent()):
            await self._server.post("/abort_request", {"abort_all": True})
        else:
            for request in sent:
                await self._server.post("/abort_request", {"rid": request.rid})
        await asyncio.gather(*(r.sent for r in sent if r.sent is not None))
        return answers.Aborted([r.command.rollout for r in chosen if r.sent is None or r in sent])

    async def _settle(self, requests: list[Request]) -> None:
        """Wait until the scheduler has these requests: what is still on its way would miss an abort or a pause."""
        await self._link.until(lambda: all(r.queued or r.rid not in self._requests for r in requests))

    # ------------------------------------------------------------ pauses

    async def _pause(self, mode: str) -> None:
        """Pause, or change the mode of a pause, and wait until it has taken effect."""
        if not self._paused:
            await self._settle(self._requests.sent())
        before = self._stood
        await self._server.post("/pause_generation", {"mode": mode})
        await self._link.until(lambda: self._stood > before)
        self._paused = True

    async def _continue(self) -> None:
        await self._server.post("/continue_generation", {})
        self._paused = False
        for request in self._requests.live.values():
            if request.sent is None:
                self._send(request)

    async def _resume(self) -> answers.Progress:
        self._landing.require_usable()
        if self._paused:
            await self._continue()
        return self._progress()

    async def _flush(self, recompute: bool) -> bool:
        paused = self._paused
        if not paused:
            if self._requests.sent() and not recompute:
                return False
            await self._pause("in_place")
        if self._standing and not recompute:
            done = False
        else:
            # Also with nothing live: a request that has just ended is in SGLang's batch until the next step.
            await self._pause("retract")
            await self._server.post("/flush_cache", {})
            done = True
        if not paused:
            await self._continue()
        return done

    def _require_pause(self) -> None:
        if not self._paused:
            raise wire.Refused("only inside a pause")

    # ------------------------------------------------------------ memory

    async def _sleep(self, level: int) -> answers.Slept:
        self._require_pause()
        if self._standing:
            raise wire.Refused("live requests stand on the KV: abort or retract them first")
        async with self._held(self._pace.sleep.of(level)):
            self._landing.sleep(level)
            before = self._server.rss()
            # With a request in its batch, and be it one that has just ended, the server would die of a release.
            await self._pause("retract")
            tags = [TAGS[tag] for tag in sorted(self._landing.asleep)]
            await self._server.post("/release_memory_occupation", {"tags": tags})
            after = self._server.rss()
        return answers.Slept(level, before, after, before - after)

    async def _wake(self, tags: list[str]) -> answers.Woken:
        async with self._held(self._pace.wake.of(len(tags))):
            before = set(self._landing.awake)
            self._landing.wake(tags)
            # What was not released must not be resumed: the server would die of it.
            if woken := set(self._landing.awake) - before:
                tags = [TAGS[tag] for tag in sorted(woken)]
                await self._server.post("/resume_memory_occupation", {"tags": tags})
        return answers.Woken(self._landing.awake, self._landing.usable)

    # ------------------------------------------------------------ updates

    def _begin_update(self, version: int) -> answers.Done:
        self._require_pause()
        self._landing.begin_update(version)
        self._work_pacer.rest()
        self._work_pacer.start()
        return answers.Done()

    async def _take(self, copy: Callable[[], int]) -> answers.Moved:
        self._landing.require_update()
        began = time.monotonic_ns()
        copied = await asyncio.to_thread(copy)
        self._landing.received(copied)
        if self._config.pace is not None:
            await asyncio.to_thread(self._work_pacer.hold, self._pace.bucket.of(copied))
        return answers.Moved(copied, time.monotonic_ns() - began)

    async def _end_update(self, version: int) -> answers.Updated:
        self._work_pacer.rest()
        size = self._landing.end_update(version)
        self._landing.usable = False
        await self._install(version)
        self._landing.usable = True
        return answers.Updated(version, size, self._landing.checksum(), self._progress().live)

    async def _install(self, version: int) -> None:
        """Bring this child's weights into the paused server, and see that they are there."""
        await self._server.post("/begin_weight_update", {})
        try:
            update = {
                "serialized_named_tensors": [self._landing.payload()],
                "weight_version": str(version),
                # Refused while requests hold KV, with the weights changed all the same. Nothing but theirs is cached.
                "flush_cache": False,
            }
            await self._server.post("/update_weights_from_tensor", update)
        finally:
            await self._server.post("/end_weight_update", {})
        await self._compare()

    async def _compare(self) -> None:
        """Raise unless the server's parameters are this child's, bit for bit."""
        told = await self._server.post("/weights_checker", {"action": "checksum"})
        found, expected = told["ranks"][0]["checksums"], self._landing.expected()
        if found != expected:
            names = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
            raise RuntimeError(f"the server's weights are not what it was given: {', '.join(names)}")

    async def _reset(self) -> answers.Done:
        if self._requests.live:
            raise wire.Refused(f"{len(self._requests.live)} requests are live")
        if self._landing.asleep:
            await self._wake(sorted(self._landing.asleep))
        self._group.leave()
        await self._pause("retract")
        self._landing.forget()
        await self._install(0)
        await self._server.post("/flush_cache", {})
        await self._continue()
        self._forget()
        return answers.Done()

    # ------------------------------------------------------------ answers

    @property
    def _max_request_tokens(self) -> int:
        # A longer output would be cut short. The server tells the bound of the input: five less than of all, and one
        # token stays free.
        return int(self._info["max_req_input_len"]) + 4

    @asynccontextmanager
    async def _held(self, cost: int) -> AsyncIterator[None]:
        self._work_pacer.rest()
        self._work_pacer.start()
        yield
        if self._config.pace is not None:
            await asyncio.to_thread(self._work_pacer.hold, cost)
        self._work_pacer.rest()

    def _progress(self) -> answers.Progress:
        self._link.drain()
        return answers.Progress({r: q.made for r, q in self._requests.live.items()}, self._landing.version)

    def _count(self) -> answers.Counted:
        self._link.drain()
        steps, before, work = self._totals, self._before, self._work_pacer
        return answers.Counted(
            held=steps.held - before.held + work.held,
            declared_ns=steps.declared_ns - before.declared_ns + work.declared_ns,
            overruns=steps.overruns - before.overruns + work.overruns,
            overrun_ns=steps.overrun_ns - before.overrun_ns + work.overrun_ns,
            cpu_ns=time.process_time_ns() + self._server.cpu_ns(),
            rss=resident() + self._server.rss(),
        )

    def loaded(self) -> answers.Loaded:
        """The answer to `Load`."""
        info = self._info
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
            sleep_levels=(1, 2),
            sleep_frees=("weights", "kv") if info["enable_memory_saver"] else (),
            wake_tags=("weights", "kv"),
            transports=("shared", "broadcast", "disk"),
            in_place_update=True,
            abort_partials=True,
            step_trace=True,
        )
        weights = self._landing.weights
        return answers.Loaded(msgspec.to_builtins(capabilities), weights.nbytes, weights.checksum())


async def run(kind: type[SglangEngine], port: wire.Port) -> int:
    """Serve one parent until it closes the socket; the exit code."""
    first = await asyncio.to_thread(port.receive)
    if first is None or not isinstance(first.command, commands.Load):
        print("the first command must be Load", file=sys.stderr)
        return 2
    engine = kind(msgspec.convert(first.command.config, EngineConfig), port)
    await engine.start()
    try:
        port.send(wire.Answer(first.id, engine.loaded()))
        inbox: asyncio.Queue[wire.Call | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def read() -> None:
            call: wire.Call | None = first
            while call is not None:
                call = port.receive()
                loop.call_soon_threadsafe(inbox.put_nowait, call)

        threading.Thread(target=read, daemon=True).start()
        await engine.serve(inbox)
        return 0
    except Exception as error:
        traceback.print_exc()
        port.notify(answers.Fatal(f"{type(error).__name__}: {error}"))
        return SERVER_DIED
    finally:
        engine.close()


def main(kind: type[SglangEngine] = SglangEngine) -> None:
    """Be the child, and leave without waiting for threads that read or sleep."""
    code = asyncio.run(run(kind, wire.Port(adopt())))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
