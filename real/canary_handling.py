"""One weight update of an engine with a request on it, handled as a cell of the matrix says, and what was decoded.

A request is brought on its way under version ``old``; then comes version ``new``; then the rest of that request, and a
fresh one of the same prompt. With each answer goes what a scheduler would claim of it: from the engine's labels, the
cut that the engine reports, and what the handling promises about KV. What becomes of the running request:

* ``drain``: it ends before the update. Somebody waits for its end and then pauses (``keep``), or the pause does
  (``wait``).
* ``resubmit``: it comes back and is sent again with the tokens so far. It is aborted by name before the pause
  (``keep``), or by the pause (``abort``).
* ``hold``: it goes on after the pause. It stands on its KV meanwhile (``keep``), or goes back to the queue and computes
  its KV anew (``retract``).
* ``sleep``: aborted by name; the engine sleeps at level 2 and wakes before the update.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Literal

from msgspec import Struct

from . import answers
from .canary import BOS, PARTS, Claim, Label, Mismatch, Run, label, mismatches, runs
from .canary_forger import Forger
from .child import ChildDied
from .client import EngineClient
from .commands import PauseMode, Piece
from .transport import Buckets, Sink, TornWeights
from .wire import Refused

Running = Literal["drain", "resubmit", "hold", "sleep"]
Fault = Literal[
    "none",
    "old embedding",
    "old MLP",
    "old head",
    "old v_proj 0",
    "old v_proj 1",
    "half the buckets",
    "phantom",
    "stale replica",
    "kept KV",
    "stale prefix",
    "late abort",
    "no pause",
    "no update",
    "late label",
]

ENOUGH = 4
"""Tokens of the running request on each side of the update, at least."""
MOST = 2000
"""Tokens of a request that is called back when it has given enough."""
GUARDS = (Refused, TornWeights)
"""What a guard raises."""


class Early(Exception):  # noqa: N818
    """The running request came to its end before anything was done with it: this process had to wait for a core."""


class Handling(Struct, frozen=True):
    """What is done around an update: what becomes of the running request, in which pause, and whether KV is flushed
    afterwards."""

    running: Running
    pause: PauseMode
    flush: bool


class Answer(Struct, frozen=True):
    """What one request decoded, what it says, and where it contradicts what was claimed."""

    request: str
    claimed: list[Claim]
    said: list[Run]
    mismatches: list[Mismatch]
    own: Label | None
    """The library's own word, if it says any."""


class Ear:
    """Ends of requests, as an engine tells them."""

    def __init__(self) -> None:
        self._told: dict[str, asyncio.Future[answers.Ended]] = {}
        self._down: ChildDied | None = None

    def fall(self, error: ChildDied) -> None:
        """The engine's `on_down`: who waits is told."""
        self._down = error
        for told in self._told.values():
            if not told.done():
                told.set_exception(error)

    def hear(self, told: answers.Ended) -> None:
        """The engine's `on_ended`."""
        self.of(told.rollout).set_result(told)

    def of(self, request: str) -> asyncio.Future[answers.Ended]:
        """The end of a request, now or later."""
        if self._down is not None:
            raise self._down
        return self._told.setdefault(request, asyncio.get_running_loop().create_future())


class Slow:
    """A sink that lets something be done after each bucket."""

    def __init__(self, engine: EngineClient, between: Callable[[], Awaitable[None]]) -> None:
        self.name = engine.name
        self._engine, self._between = engine, between
        self.join, self.leave = engine.join, engine.leave
        self.begin_update, self.end_update = engine.begin_update, engine.end_update

    async def copy_bucket(self, path: str, size: int, pieces: list[Piece]) -> answers.Moved:
        """Copy one bucket out of shared memory."""
        moved = await self._engine.copy_bucket(path, size, pieces)
        await self._between()
        return moved

    async def receive(self, bucket_bytes: int, index: int) -> answers.Moved:
        """Take one bucket from the broadcast group."""
        moved = await self._engine.receive(bucket_bytes, index)
        await self._between()
        return moved

    async def read_bucket(self, path: str, bucket_bytes: int, index: int) -> answers.Moved:
        """Read one bucket out of a checkpoint file."""
        moved = await self._engine.read_bucket(path, bucket_bytes, index)
        await self._between()
        return moved


async def steps(engine: EngineClient, count: int = ENOUGH) -> None:
    """Wait until each live request of an engine that runs has ``count`` tokens more."""
    before = (await engine.resume()).live
    while True:
        await asyncio.sleep(0.002)
        now = (await engine.resume()).live
        if all(now.get(r, n + count) >= n + count for r, n in before.items()):  # or it has ended
            return


def prompt_of(page_size: int) -> list[int]:
    """Two whole KV pages and half of one: enough for a prefix to be shared, by whichever engine."""
    return [BOS, *(8 + i % 8 for i in range(5 * max(page_size, 16) // 2 - 1))]


class Update:
    """One update, from version ``old`` to the next. ``careful``: stop where a guard objects, by raising its
    objection; otherwise go on as if it had not. ``other`` is a second engine, for the fault that needs one."""

    def __init__(
        self,
        source: Forger,
        transport: Buckets,
        engine: EngineClient,
        other: EngineClient,
        ear: Ear,
        old: int,
        careful: bool,
    ) -> None:
        self._source, self._transport, self._engine, self._other = source, transport, engine, other
        self._ear, self._careful = ear, careful
        self._old, self._new = old, old + 1
        self._prompt = prompt_of(engine.capabilities.page_size)
        self._asked = 0
        self._answers: list[Answer] = []

    async def prepare(self, whole: Buckets) -> None:
        """Whatever came before: version ``old`` whole on the engine, nothing live, no KV, not paused."""
        with suppress(Refused):
            await self._engine.resume()
        await self._engine.abort()
        await self._engine.pause()
        await self._engine.wake()
        await self._engine.flush()
        self._source.hold(self._old)
        pushed = await whole.push(self._source, [self._engine], self._old)
        if pushed.failed:
            raise pushed.failed[self._engine.name]
        await self._engine.resume()

    async def run(self, handling: Handling, fault: Fault) -> list[Answer]:
        """Handle it; what was decoded. Raises Refused or TornWeights where a guard objects."""
        self._hold(fault)
        match handling.running:
            case "drain":
                await self._drained(handling, fault)
            case "resubmit" | "sleep":
                await self._interrupted(handling, fault)
            case "hold":
                await self._held(handling, fault)
        updated = self._old if fault == "no update" else self._new
        await self._generate("fresh", self._prompt, 2 * ENOUGH, [Claim(2 * ENOUGH, updated, updated)])
        return self._answers

    def _hold(self, fault: Fault) -> None:
        part = fault.removeprefix("old ")
        if part in PARTS:
            self._source.hold(self._new, old=PARTS[part])
        elif fault == "phantom":
            self._source.hold(self._new, self._old)
        else:
            self._source.hold(self._new, half=fault == "half the buckets")

    # ---- what becomes of the running request

    async def _drained(self, handling: Handling, fault: Fault) -> None:
        waits = handling.pause == "wait"
        length = (20 if waits else 2) * ENOUGH
        name = await self._submit(self._prompt, length)
        if waits:
            await steps(self._engine)
        else:
            await self._ear.of(name)
        await self._engine.pause(handling.pause)
        await self._update(handling.flush, fault)
        await self._engine.resume()
        self._keep("running", await self._ear.of(name), [Claim(length, self._old, self._old)])

    async def _interrupted(self, handling: Handling, fault: Fault) -> None:
        sleep, late = handling.running == "sleep", fault == "late abort"
        name = await self._submit(self._prompt, MOST)
        await steps(self._engine)
        by_name = handling.pause != "abort"
        if by_name and not late:
            await self._engine.abort([name])
        await self._engine.pause(handling.pause)
        if by_name and late:
            await self._engine.abort([name])
        if sleep:
            await self._engine.sleep(2)
            await self._engine.wake(["kv", "weights"] if fault == "no update" else ["weights"])
        if fault != "no update":
            await self._update(handling.flush and not sleep, fault)
        await self._engine.wake(["kv"])
        await self._engine.resume()
        part = await self._ear.of(name)
        if part.reason != "abort":
            raise Early(f"a request of {MOST} tokens ended before its abort")
        # The label of an aborted request is the version of its first token.
        self._keep("running", part, [Claim(len(part.tokens), part.version, part.version)])
        if fault != "no update":
            claim = Claim(2 * ENOUGH, self._new, self._new)
            await self._generate("resumed", [*self._prompt, *part.tokens], 2 * ENOUGH, [claim])

    async def _held(self, handling: Handling, fault: Fault) -> None:
        name = await self._submit(self._prompt, MOST)
        await steps(self._engine)
        cut = 0
        if fault != "no pause":
            live = (await self._engine.pause(handling.pause)).live
            if name not in live:
                raise Early(f"a request of {MOST} tokens ended before the pause")
            cut = live[name]
        # The engine's own word on how far the request had come, where it was updated.
        cut = (await self._update(handling.flush, fault)).get(name, cut)
        await self._engine.resume()
        await steps(self._engine)
        await self._engine.abort([name])
        end = await self._ear.of(name)
        rest = len(end.tokens) - cut
        first = self._new if fault == "late label" else end.version
        kv = self._new if handling.flush or handling.pause == "retract" else end.version
        self._keep("running", end, [Claim(cut, first, first), Claim(rest, self._new, kv)])

    # ---- the update

    async def _update(self, flush: bool, fault: Fault) -> dict[str, int]:
        """Bring the new version and flush; how far each live request had come, by the engine's word."""
        engine = self._engine
        sinks: Sequence[Sink] = [engine]
        if fault == "stale replica":
            await self._other.pause()
            sinks = [self._other]
        elif fault == "no pause":
            sinks = [Slow(engine, self._meanwhile)]
        pushed = await self._transport.push(self._source, sinks, self._new)
        if self._careful and pushed.failed:
            raise next(iter(pushed.failed.values()))
        if fault == "stale replica":
            await self._other.resume()
        if flush and fault not in ("stale prefix", "no pause"):
            flushed = await engine.flush(recompute=fault != "kept KV")
            if self._careful and not flushed.ok:
                raise Refused("no flush while live requests stand on KV")
        return pushed.updated[engine.name].live if engine.name in pushed.updated else {}

    async def _meanwhile(self) -> None:
        # A request of its own: on a busy machine the running one may be over before the last bucket.
        await self._generate("during", self._prompt, ENOUGH, [Claim(ENOUGH, self._old, self._old)])

    # ---- requests

    async def _submit(self, tokens: list[int], length: int) -> str:
        self._asked += 1
        name = f"v{self._old}/{self._careful}/{self._asked}"
        await self._engine.submit(name, tokens, length)
        return name

    async def _generate(self, request: str, tokens: list[int], length: int, claims: list[Claim]) -> None:
        name = await self._submit(tokens, length)
        self._keep(request, await self._ear.of(name), claims)

    def _keep(self, request: str, end: answers.Ended, claims: list[Claim]) -> None:
        claims, tokens = [claim for claim in claims if claim.n], end.tokens
        own = None if end.labels is None else label(end.labels, tokens, self._new)
        self._answers.append(Answer(request, claims, runs(tokens, self._new), mismatches(tokens, claims), own))
