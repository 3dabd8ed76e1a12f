"""vLLM's controls, made exact over an engine core in a process of its own, whichever way leads there.

A `Port` is such a way: `vllm_async` calls vLLM's `AsyncLLM`, `vllm_http` asks its server. What neither says in time
comes past them from the core's scheduler (see `vllm_core`): steps, requests taken in, pauses and who they found.

vLLM's front-end answers a pause only after it has taken in every token that the core had made by then. So an abort is
sent inside a pause, where its tokens are all that were computed; and an end that came before a pause is told before it.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Protocol

import msgspec

from ..answers import Step
from ..commands import Json, PauseMode, Submit
from ..config import EngineConfig
from .family import Family, gone
from .hosted_requests import Request, Requests
from .link import LINK, Link, Record, Stepped, Stood, Taken, Terms, Totals
from .residence import PARTS
from .vllm_arguments import arguments, sampling
from .vllm_landing import VllmLanding

TAGS = {"weights": "weights", "kv": "kv_cache"}
"""What vLLM calls the parts that sleep."""
NATIVE = {"keep": ("keep", False), "retract": ("keep", True), "abort": ("abort", False), "wait": ("wait", False)}
"""Our pause modes as vLLM's `mode` and `clear_cache`: a cache is cleared by preempting all that stand on it."""
SCHEDULER = "rlsched.real.engines.vllm_core.CoreScheduler"
WORKER = "rlsched.real.engines.vllm_worker.WorkerExtension"
Told = Callable[[Request, list[int], list[float]], None]
"""Takes an ended request, its tokens, and their log-probabilities."""


class Output(NamedTuple):
    """How vLLM answers a request."""

    tokens: list[int]
    logprobs: list[float]
    reason: str
    labels: list[tuple[int, int]] | None
    cached: int | None


class Port(Protocol):
    """A way to vLLM's controls; each method returns when vLLM has answered."""

    @property
    def family(self) -> Family:
        """vLLM's processes."""

    async def start(self, arguments: dict[str, Any], environment: dict[str, str]) -> None:
        """Start vLLM with these arguments, and this in the engine core's environment."""

    async def generate(self, rid: str, tokens: list[int], sampling: Json) -> Output:
        """Generate, to the request's end."""

    async def abort(self, rids: list[str]) -> None:
        """End these requests."""

    async def pause(self, mode: str, clear_cache: bool) -> None:
        """Pause generation."""

    async def resume(self) -> None:
        """Resume generation."""

    async def reset_prefix_cache(self, running: bool) -> bool:
        """Forget cached KV; `running`: preempt the requests that stand on it."""

    async def ask_worker(self, method: str, **arguments: Any) -> Any:
        """Call a method of the worker; its answer."""

    async def label(self, version: str) -> None:
        """Call the weights this."""


class VllmDriver:
    """One vLLM. `on_end` is told of every request's end, before whatever ended it returns."""

    def __init__(self, config: EngineConfig, landing: VllmLanding, port: Port, on_end: Told) -> None:
        self._config = config
        self._landing = landing
        self._port = port
        self._on_end = on_end
        self._link = Link(self._on_record)
        self._requests = Requests()
        self._there: set[str] = set()  # who had not ended when the pause took effect
        self.about: dict[str, Any] = {}
        """What the worker says of itself."""
        self.paused = False
        self.standing: set[str] = set()
        """Ids of the requests that hold KV in this pause."""
        self.totals = Totals()
        self.steps: list[Step] | None = None
        """Steps are added while it is a list."""
        self._fault: asyncio.Future[None] = asyncio.get_running_loop().create_future()  # only ever fails

    @property
    def family(self) -> Family:
        """vLLM's processes."""
        return self._port.family

    async def start(self) -> None:
        """Start vLLM on the landing's weights."""
        step = None if self._config.pace is None else self._config.pace.step
        terms = msgspec.json.encode(Terms(self._link.address, step)).decode()
        with TemporaryDirectory(prefix="rlsched-vllm-") as folder:
            self._landing.model.save_pretrained(folder)
            chosen = {**arguments(self._config, folder), "scheduler_cls": SCHEDULER, "worker_extension_cls": WORKER}
            # Sockets between vLLM's processes: in the abstract namespace nothing of them is left behind.
            environment = {
                LINK: terms,
                "VLLM_RPC_BASE_PATH": f"@{self._link.address}",
                # Outputs of one step are taken in at once: a pause's answer then never overtakes them.
                "VLLM_V1_OUTPUT_PROC_CHUNK_SIZE": str(max(128, self._config.max_requests)),
            }
            await self._port.start(chosen, environment)
        try:
            self.about = await self._port.ask_worker("rlsched_describe")
            if self.about["device"] != self._config.device:
                raise ValueError(f"this vLLM computes on {self.about['device']}, not on {self._config.device}")
            await self._port.label("0")
            await self._warm()
            await self.pause()
            await self.install(0)
            await self.resume()
        except BaseException:
            self.family.kill()
            raise

    async def _warm(self) -> None:
        """Make the steps that vLLM takes long over: its first ones, of one request and of some."""
        for n in (1, 4):
            asked = sampling(self._config, 4, forced=True)
            await asyncio.gather(*(self._port.generate(f"warm{n}{i}", [0] * 4, asked) for i in range(n)))

    async def broken(self) -> None:
        """Wait for the end of vLLM or of its core, or for a failure of the traffic with them, and raise it."""
        core = asyncio.ensure_future(gone(self.about["core"]))
        whole = asyncio.ensure_future(gone(self.family.pids()[0]))
        await asyncio.wait({core, whole, self._fault}, return_when=asyncio.FIRST_COMPLETED)
        # The traffic fails when a process does, and may be the first to say so.
        await asyncio.wait({core, whole}, timeout=1.0, return_when=asyncio.FIRST_COMPLETED)
        over = core.done() or whole.done()
        core.cancel()
        whole.cancel()
        if over:
            raise RuntimeError(f"the vLLM engine core (pid {self.about['core']}) or its server ended")
        self._fault.result()

    def _on_record(self, record: Record) -> None:
        match record:
            case Taken(rid):
                self._requests.taken(rid)
            case Stepped(step, made, totals):
                self.totals = totals
                self._requests.stepped(made, self._landing.version)
                if self.steps is not None:
                    self.steps.append(step)
            case Stood(standing, there):
                self.standing, self._there = set(standing), set(there or ())

    def look(self) -> dict[str, Request]:
        """The live requests by rollout, as they stand after the last step."""
        self._link.drain()
        return self._requests.live

    # ------------------------------------------------------------ requests

    def submit(self, command: Submit) -> None:
        """Send a request; in a pause vLLM queues it."""
        request = self._requests.add(command)
        request.sent = asyncio.create_task(self._generate(request))

    async def _generate(self, request: Request) -> None:
        """One request, from here into vLLM and back."""
        command = request.command
        try:
            asked = sampling(self._config, command.max_new_tokens, command.forced)
            output = await self._port.generate(request.rid, command.tokens, asked)
            # The records of its steps were sent before; they are only to be read.
            self._link.drain()
            self._end(request, output)
        except Exception as error:
            if not self._fault.done():
                self._fault.set_exception(error)

    def _end(self, request: Request, output: Output) -> None:
        tokens, name, spans = output.tokens, request.command.rollout, request.spans()
        request.reason = request.ended(tokens, output.reason, self._config.eos)
        request.labels, request.cached = output.labels, output.cached
        if not request.made == len(tokens) == len(output.logprobs):
            print(f"{name}: {request.made} made, {len(tokens)} came, {len(output.logprobs)} logprobs", file=sys.stderr)
        if [label for label in output.labels or () if label[1]] != spans:
            print(f"{name}: vLLM says {output.labels}, installed was {spans}", file=sys.stderr)
        self._requests.remove(request)
        self.standing.discard(request.rid)
        self._on_end(request, tokens, output.logprobs)

    async def abort(self, rollouts: list[str] | None) -> list[str]:
        """End these requests (None: all); which were ended by it."""
        wanted = None if rollouts is None else set(rollouts)
        chosen = [r for r in self._requests.live.values() if wanted is None or r.command.rollout in wanted]
        if not chosen:
            return []
        paused = self.paused
        if not paused:
            await self.pause()
        else:
            await self._settle(chosen)
        inside = [r for r in chosen if r.rid in self._requests]
        await self._port.abort([r.rid for r in inside])
        await self._ends(inside)
        if not paused:
            await self.resume()
        return [r.command.rollout for r in inside]

    async def _settle(self, requests: list[Request]) -> None:
        """Wait until the scheduler has these requests: what is still on its way would miss an abort or a pause."""
        await self._unless_broken(
            self._link.until(lambda: all(r.queued or r.rid not in self._requests for r in requests))
        )

    async def _ends(self, requests: list[Request]) -> None:
        """Wait until the ends of these requests have been told."""
        await self._unless_broken(asyncio.gather(*(r.sent for r in requests if r.sent is not None)))

    async def _unless_broken(self, work: Any) -> None:
        waiting = asyncio.ensure_future(work)
        await asyncio.wait({waiting, self._fault}, return_when=asyncio.FIRST_COMPLETED)
        if self._fault.done():
            waiting.cancel()
            self._fault.result()
        await waiting

    # ------------------------------------------------------------ pauses

    async def pause(self, mode: PauseMode = "keep") -> None:
        """Stand still at a step's end; another mode may follow inside the pause."""
        await self._settle(self._requests.sent())
        await self._port.pause(*NATIVE[mode])
        if mode == "wait":
            # Only who was queued is still there; a second pause tells who.
            await self._port.pause(*NATIVE["keep"])
        self.paused = True
        self._link.drain()
        await self._ends([r for r in self._requests.sent() if r.rid not in self._there])

    async def resume(self) -> None:
        """Go on, with all that has been submitted in the queue."""
        await self._settle(self._requests.sent())
        await self._port.resume()
        self.paused = False
        self.standing = set()

    async def flush(self, recompute: bool) -> bool:
        """Drop all KV, unless live requests hold some; with `recompute` they compute theirs anew."""
        done = await self._port.reset_prefix_cache(recompute)
        self._link.drain()
        return done

    # ------------------------------------------------------------ memory and weights

    async def sleep(self, parts: list[str]) -> None:
        """Release these parts of the memory, in a pause in which nothing stands."""
        # As vLLM's own `sleep` does it, which also clears the cache first. Its `wake_up` would end the pause as well.
        await self._port.pause(*NATIVE["retract"])
        self._asleep = set(parts)
        await self._port.ask_worker("sleep", level=len(parts))

    async def wake(self, parts: list[str]) -> None:
        """Take these parts, which sleep. At level 1 vLLM has moved the weights, too, and they come back with the KV."""
        if parts:
            whole = parts if "weights" in self._asleep else PARTS
            await self._port.ask_worker("wake_up", tags=[TAGS[part] for part in whole])

    async def install(self, version: int) -> None:
        """Bring the landing's weights into the paused vLLM, and see that they are there."""
        with self._landing.handed() as (path, size, places):
            told = await self._port.ask_worker("rlsched_load", path=path, size=size, places=places)
        if told["digest"] != self._landing.digest():
            raise RuntimeError("vLLM does not compute with the weights that it was given")
        await self._port.label(str(version))
        # Refused while requests stand on KV; then the scheduler sees to it that they share it with nobody.
        await self._port.reset_prefix_cache(False)
        self._link.drain()

    async def seed(self, seed: int) -> None:
        """Sample from this seed on."""
        await self._port.ask_worker("rlsched_seed", seed=seed)
