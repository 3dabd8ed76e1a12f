"""SGLang's controls over HTTP, made exact: when one of these returns, it has taken effect.

Requests run beside the controls, each a `/generate` that is answered when the request ends. What SGLang does not say in
time, or says too early, comes past HTTP from a hook in its scheduler (see `sglang_link`): steps, pauses that have taken
effect, requests taken in. So no abort misses a request on its way in, and no answer outruns the step it stands for.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec

from ..answers import Step
from ..commands import Submit
from ..config import EngineConfig
from .sglang_landing import Landing
from .sglang_link import LINK, Link, Record, Stepped, Stood, Taken, Terms, Totals
from .sglang_process import Server
from .sglang_requests import Request, Requests

TAGS = {"weights": "weights", "kv": "kv_cache"}
"""Parts of the memory, as SGLang calls them."""
Told = Callable[[Request, list[int], list[float]], None]
"""Takes an ended request, its tokens, and their log-probabilities."""


class Driver:
    """One SGLang server. `on_end` is told of every request's end, before whatever ended it returns."""

    def __init__(self, config: EngineConfig, landing: Landing, on_end: Told) -> None:
        self._config = config
        self._landing = landing
        self._on_end = on_end
        self._link = Link(self._on_record)
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

    async def start(self, sharing: bool) -> None:
        """Start the server on the landing's weights. `sharing`: whether requests share the KV of equal prefixes."""
        step = None if self._config.pace is None else self._config.pace.step
        terms = msgspec.json.encode(Terms(self._link.address, step)).decode()
        with TemporaryDirectory(prefix="rlsched-sglang-") as folder:
            self._landing.model.save_pretrained(folder)
            arguments = arguments_of(self._config, folder, sharing)
            self.server = await Server.start(arguments, {LINK: terms}, self._config.threads)
        try:
            # Each flush collects garbage, for 0.4 s unless what is there from the start is left out. The server asks
            # that of itself, but at times before it listens, and then not again.
            await self.server.post("/freeze_gc", {})
            self.info = await self.server.get("/server_info")
            await self._compare()
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

    async def ping(self) -> None:
        """Wait for a word of the scheduler, between two steps of its own."""
        await self.server.get("/server_info")

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
            answer = await self.server.post("/generate", request.body(self._config.temperature, self._config.eos))
            tokens: list[int] = answer["output_ids"]
            # The record of its last step may still be on the way.
            async with asyncio.timeout(10):
                await self._link.until(lambda: request.made >= len(tokens))
        except Exception as error:
            if not self._fault.done():
                self._fault.set_exception(error)
            return
        self._end(request, tokens, answer["meta_info"])

    def _end(self, request: Request, tokens: list[int], meta: dict[str, Any]) -> None:
        logprobs = [float(entry[0]) for entry in meta.get("output_token_logprobs", [])]
        request.reason = request.ended(tokens, str(meta["finish_reason"]["type"]), self._config.eos)
        name, spans = request.command.rollout, request.spans()
        if not request.made == len(tokens) == len(logprobs):
            print(f"{name}: {request.made} made, {len(tokens)} came, {len(logprobs)} logprobs", file=sys.stderr)
        labels = [(int(s["version"]), s["end"] - s["start"]) for s in meta.get("weight_versions") or ()]
        if [label for label in labels if label[1]] != spans:
            print(f"{name}: SGLang says {labels}, installed was {spans}", file=sys.stderr)
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
            await self.server.post("/abort_request", {"abort_all": True})
        else:
            for request in inside:
                await self.server.post("/abort_request", {"rid": request.rid})
        await asyncio.gather(*(r.sent for r in inside if r.sent is not None))
        return [r.command.rollout for r in (*waiting, *inside) if r.reason == "abort"]

    async def _settle(self, requests: list[Request]) -> None:
        """Wait until the scheduler has these requests: what is still on its way would miss an abort or a pause."""
        settled = asyncio.ensure_future(
            self._link.until(lambda: all(r.queued or r.rid not in self._requests for r in requests))
        )
        await asyncio.wait({settled, self._fault}, return_when=asyncio.FIRST_COMPLETED)
        settled.cancel()

    # ------------------------------------------------------------ pauses

    async def pause(self, mode: Literal["in_place", "retract"] = "in_place") -> None:
        """Stand still at a step's end; `retract` puts what runs back into the queue, also inside a pause."""
        if not self.paused:
            await self._settle(self._requests.sent())
        before = self._stood
        await self.server.post("/pause_generation", {"mode": mode})
        await self._link.until(lambda: self._stood > before)
        self.paused = True

    async def resume(self) -> None:
        """Go on, and send what has waited here."""
        await self.server.post("/continue_generation", {})
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
        await self.server.post("/flush_cache", {})
        if not paused:
            await self.resume()
        return True

    # ------------------------------------------------------------ memory and weights

    async def sleep(self, parts: list[str]) -> None:
        """Release these parts of the memory, in a pause in which nothing stands."""
        # With a request in its batch, and be it one that has just ended, the server would die of a release.
        await self.pause("retract")
        await self.server.post("/release_memory_occupation", {"tags": [TAGS[part] for part in parts]})

    async def wake(self, parts: list[str]) -> None:
        """Resume these parts, which sleep: resuming others would be the server's death."""
        if parts:
            await self.server.post("/resume_memory_occupation", {"tags": [TAGS[part] for part in parts]})

    async def install(self, version: int) -> None:
        """Bring the landing's weights into the paused server, and see that they are there."""
        await self.server.post("/begin_weight_update", {})
        try:
            update = {
                "serialized_named_tensors": [self._landing.payload()],
                "weight_version": str(version),
                # Refused while requests hold KV, with the weights changed all the same. Without a prefix cache there
                # is no other KV; theirs is theirs.
                "flush_cache": False,
            }
            await self.server.post("/update_weights_from_tensor", update)
        finally:
            await self.server.post("/end_weight_update", {})
        await self._compare()

    async def _compare(self) -> None:
        """Raise unless the server's parameters are the landing's, bit for bit."""
        told = await self.server.post("/weights_checker", {"action": "checksum"})
        found, expected = told["ranks"][0]["checksums"], self._landing.expected()
        if found != expected:
            names = sorted(n for n in {*found, *expected} if found.get(n) != expected.get(n))
            raise RuntimeError(f"the server's weights are not what it was given: {', '.join(names)}")


def arguments_of(config: EngineConfig, folder: str, sharing: bool) -> list[str]:
    """The server's command line."""
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
    # No tokenizer: nothing but token ids comes and goes. Overlapped, a step's tokens would come out only after the next
    # step has begun.
    switches = ["skip-tokenizer-init", "skip-server-warmup", "sleep-on-idle", "disable-overlap-schedule"]
    if not sharing:
        switches.append("disable-radix-cache")
    valued = [word for name, value in chosen.items() for word in (f"--{name}", str(value))]
    return [*valued, *(f"--{name}" for name in switches)]
