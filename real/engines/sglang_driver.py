"""SGLang's controls over HTTP, made exact: when one of these returns, it has taken effect.

Requests run beside the controls, each a `/generate` that is answered when the request ends. What SGLang does not say in
time, or says too early, comes past HTTP from a hook in its scheduler (see `link`): steps, pauses that have taken
effect, requests taken in. So no abort misses a request on its way in, and no answer outruns the step it stands for.
"""

from __future__ import annotations

import asyncio
import sys
import traceback
from collections.abc import Awaitable, Callable
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from ..answers import Step
from ..commands import Json, PauseMode, Submit
from ..config import EngineConfig
from .hosted_requests import Request, Requests
from .http import Silent
from .link import LINK, Link, Record, Stepped, Stood, Taken, Terms, Totals
from .sglang_arguments import arguments_of, body_of
from .sglang_landing import SglangLanding
from .sglang_process import PATIENCE_S, Server
from .sglang_updates import Updates

PING_S = 20.0
"""How long the scheduler may take to come by; it does after each step."""
TAGS = {"weights": "weights", "kv": "kv_cache"}
"""Parts of the memory, as SGLang calls them."""
Told = Callable[[Request, list[int], list[float]], None]
"""Takes an ended request, its tokens, and their log-probabilities."""


class SglangDriver:
    """One SGLang server. `on_end` is told of every request's end, before whatever ended it returns. `sharing`: whether
    requests share the KV of equal prefixes."""

    def __init__(self, config: EngineConfig, landing: SglangLanding, on_end: Told, sharing: bool) -> None:
        self._config = config
        self._landing = landing
        self._on_end = on_end
        self._sharing = sharing
        self._link = Link(self._on_record)
        self._updates = Updates(self._post, landing, config.device)
        self._requests = Requests()
        self._stood = 0  # pauses that have taken effect
        self.server: Server
        self.info: dict[str, Any] = {}
        """What the server says of itself."""
        self.paused = False
        self.standing: set[str] = set()
        """Ids of the requests that held KV when the pause took effect; empty after a retract."""
        self.totals = Totals()
        self.steps: list[Step] | None = None
        """Steps are added while it is a list."""
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # only ever fails

    @property
    def family(self) -> Server:
        """The server's processes."""
        return self.server

    async def start(self) -> None:
        """Start the server on the landing's weights."""
        step = None if self._config.pace is None else self._config.pace.step
        terms = msgspec.json.encode(Terms(self._link.address, step)).decode()
        with TemporaryDirectory(prefix="rlsched-sglang-") as folder:
            self._landing.model.save_pretrained(folder)
            arguments = arguments_of(self._config, folder, self._sharing)
            self.server = await Server.start(arguments, {LINK: terms}, self._config.threads)
        try:
            # Each flush collects garbage, for 0.4 s unless what is there from the start is left out. The server asks
            # that of itself, but at times before it listens, and then not again.
            await self._post("/freeze_gc", {})
            self.info = await self.server.get("/server_info")
            await self._updates.compare()
        except BaseException:
            self.server.kill()
            raise

    async def broken(self) -> None:
        """Wait for the server's end, or for a failure of the traffic with it, and raise it."""
        ending = asyncio.ensure_future(self.server.ended())
        either: set[asyncio.Future[Any]] = {ending, self._fault}
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if ending.done():
            raise RuntimeError(f"the SGLang server ended: exit code {ending.result()}")
        ending.cancel()
        self._fault.result()

    async def alive(self) -> None:
        """Have the scheduler's loop come by. Raises `Silent` if it doesn't."""
        try:
            async with asyncio.timeout(PING_S):
                await self._link.order()
        except TimeoutError:
            raise self._silence(f"the SGLang scheduler has not answered for {PING_S:.0f} s") from None

    async def reseed(self, seed: int) -> None:
        """Sampling begins anew with this seed."""
        await self._until(self._link.order(seed), "seed its sampling")

    def _silence(self, what: str) -> Silent:
        stopped = self.server.stopped()
        return Silent(f"{what}; stopped: {', '.join(map(str, stopped))}" if stopped else what)

    def _fail(self, error: Exception) -> None:
        """End the engine: after this nobody knows where the server stands."""
        if not self._fault.done():
            self._fault.set_exception(error)

    async def _post(self, path: str, body: Json) -> Any:
        """Tell the server something; its silence is the engine's end."""
        try:
            return await self.server.post(path, body)
        except Silent as silence:
            error = self._silence(f"the SGLang server is silent: {silence}")
            self._fail(error)
            raise error from None

    async def _until(self, news: Awaitable[None], what: str) -> None:
        """Wait for news of the scheduler; its silence is the engine's end."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                await news
        except TimeoutError:
            error = self._silence(f"for {PATIENCE_S:.0f} s the SGLang scheduler did not {what}")
            self._fail(error)
            raise error from None

    def _on_record(self, record: Record) -> None:
        match record:
            case Taken(rid):
                self._requests.taken(rid)
            case Stepped(step, made, totals):
                self.totals = totals
                self._requests.stepped(made, self._landing.version)
                if self.steps is not None:
                    self.steps.append(step)
            case Stood(standing):
                self.standing = set(standing)
                self._stood += 1

    def look(self) -> dict[str, Request]:
        """The live requests by rollout, as they stand after the last step."""
        self._link.drain()
        return self._requests.live

    # ------------------------------------------------------------ requests

    def submit(self, command: Submit) -> None:
        """Send a request; in a pause it waits here."""
        request = self._requests.add(command)
        if not self.paused:
            self._send(request)

    def _send(self, request: Request) -> None:
        request.sent = asyncio.create_task(self._generate(request))

    async def _generate(self, request: Request) -> None:
        """One request, from here into the server and back."""
        try:
            body = body_of(request, self._config.temperature, self._config.eos)
            answer = await self.server.post("/generate", body, patience_s=None)
            tokens: list[int] = answer["output_ids"]
            # The record of its last step may still be on the way.
            await self._until(self._link.until(lambda: request.made >= len(tokens)), "tell of a step")
            self._end(request, tokens, answer["meta_info"])
        except Exception as error:
            traceback.print_exc()
            self._fail(error)

    def _end(self, request: Request, tokens: list[int], meta: dict[str, Any]) -> None:
        logprobs = [float(entry[0]) for entry in meta.get("output_token_logprobs") or ()]
        request.reason = request.ended(tokens, str(meta["finish_reason"]["type"]), self._config.eos)
        name, spans = request.command.rollout, request.spans()
        if not request.made == len(tokens) == len(logprobs):
            print(f"{name}: {request.made} made, {len(tokens)} came, {len(logprobs)} logprobs", file=sys.stderr)
        told = [(int(s["version"]), s["end"] - s["start"]) for s in meta.get("weight_versions") or ()]
        request.labels = [(version, count) for version, count in told if count]
        if request.labels != spans:
            print(f"{name}: SGLang says {request.labels}, installed was {spans}", file=sys.stderr)
        self._requests.remove(request)
        self._on_end(request, tokens, logprobs)

    async def abort(self, rollouts: list[str] | None) -> list[str]:
        """End these requests (None: all); which were ended by it."""
        wanted = None if rollouts is None else set(rollouts)
        chosen = [r for r in self._requests.live.values() if wanted is None or r.command.rollout in wanted]
        waiting = [r for r in chosen if r.sent is None]
        for request in waiting:
            self._requests.remove(request)
            self._on_end(request, [], [])
        await self._settle([r for r in chosen if r.sent is not None])
        inside = [r for r in chosen if r.rid in self._requests]
        if any(r.rid in self.standing for r in inside):
            # A running request ends with a step, and in a pause there is none; from the queue it goes at once.
            await self.pause("retract")
        if inside and len(inside) == len(self._requests.sent()):
            await self._post("/abort_request", {"abort_all": True})
        else:
            for request in inside:
                await self._post("/abort_request", {"rid": request.rid})
        await self._until(settled([r.sent for r in inside if r.sent is not None]), "end what was aborted")
        return [r.command.rollout for r in (*waiting, *inside) if r.reason == "abort"]

    async def _settle(self, requests: list[Request]) -> None:
        """Wait until the scheduler has these requests: what is still on its way would miss an abort or a pause."""
        there = self._link.until(lambda: all(r.queued or r.rid not in self._requests for r in requests))
        waiting = asyncio.ensure_future(self._until(there, "take its requests"))
        # One that the server refused will never be there.
        await asyncio.wait({waiting, self._fault}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    # ------------------------------------------------------------ pauses

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stand still at a step's end. Inside a pause `retract` still puts what runs back into the queue, and `abort`
        still ends all requests."""
        if mode == "abort":
            # By itself SGLang would look once a second whether all have ended, and inside a pause for ever: a running
            # request ends with a step. And where nothing is left, it has no need to tell its scheduler of the pause.
            await self.abort(None)
            await self._post("/pause_generation", {"mode": "abort"})
            self.paused, self.standing = True, set()
            return
        if not self.paused:
            await self._settle(self._requests.sent())
        before = self._stood
        await self._post("/pause_generation", {"mode": "in_place" if mode == "keep" else mode})
        await self._until(self._link.until(lambda: self._stood > before), "pause")
        self.paused = True

    async def resume(self) -> None:
        """Go on, and send what has waited here."""
        await self._post("/continue_generation", {})
        self.paused = False
        self.standing = set()
        for request in self._requests.live.values():
            if request.sent is None:
                self._send(request)

    async def flush(self, recompute: bool) -> bool:
        """Drop all KV, unless live requests hold some; with `recompute` they compute theirs anew."""
        paused = self.paused
        if not paused and self._requests.sent() and not recompute:
            return False
        if self.standing and not recompute:
            return False
        # Also with nothing live: a request that has just ended is in SGLang's batch until the next step.
        await self.pause("retract")
        await self._post("/flush_cache", {})
        if not paused:
            await self.resume()
        return True

    # ------------------------------------------------------------ memory and weights

    async def sleep(self, parts: list[str]) -> None:
        """Release these parts of the memory, in a pause in which nothing stands."""
        # With a request in its batch, and be it one that has just ended, the server would die of a release.
        await self.pause("retract")
        await self._post("/release_memory_occupation", {"tags": [TAGS[part] for part in parts]})

    async def wake(self, parts: list[str]) -> None:
        """Resume these parts, which sleep: resuming others would be the server's death."""
        if parts:
            await self._post("/resume_memory_occupation", {"tags": [TAGS[part] for part in parts]})

    async def install(self, version: int) -> str:
        """Bring the landing's weights into the paused server, and see that they are there; which way they went."""
        return await self._updates.install(version)


async def settled(requests: list[asyncio.Task[None]]) -> None:
    """Wait until these have ended. They are not cancelled if this is."""
    if requests:
        await asyncio.wait(requests)
