"""The matrix of handlings: what becomes of running requests x flush or keep x transport x fault, and what the tokens
said of each.

A right handling must decode what was claimed. A wrong one is first tried as rlsched would: a guard may refuse it, or
make it harmless. What is refused or harmless is done again behind the guards' back, by a handler that ignores
objections, where needed on the `bare` engine; then the tokens must show the very fault that was seeded, and not just
any contradiction.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from .canary import Reading, Sign
from .canary_forger import Forger
from .canary_handling import GUARDS, Answer, Ear, Fault, Running, Update
from .client import EngineClient
from .config import EngineConfig
from .model import CANARY
from .transport import BroadcastBuckets, Buckets, Checkpoints, SharedBuckets

BUCKET = 1 << 16
"""Bytes of a bucket: eleven to a version, so that half of them is about half."""

TRANSPORTS = ("shared memory", "gloo broadcast", "disk")
HANDLED: tuple[tuple[Running, bool], ...] = (
    ("drain", True),
    ("drain", False),
    ("abort", True),
    ("abort", False),
    ("hold", True),
    ("hold", False),
    ("sleep", True),  # flushed by sleeping
)
AWAKE, FLUSHED = HANDLED[:6], HANDLED[0:6:2]


class Seeded(Struct, frozen=True):
    """A seeded fault: where it can happen, and what the tokens must say."""

    invariant: str
    """The promise that it breaks; docs/canary.md says under which id the checker has it."""
    handled: tuple[tuple[Running, bool], ...]
    version: int | None
    """Said by the head: 0 the old version, 1 the new one. None: the tokens say nothing that these weights can say."""
    kv: int = 0
    """Said of BOS's KV: 0 or 1."""
    signs: tuple[Sign, ...] = ()
    bare: bool = False
    """Whether the way around the guards needs the bare engine; otherwise ignoring objections is enough."""
    moves: bool = True
    """Whether there is a transfer, so that the transport matters."""

    def shown(self, old: int) -> Reading | None:
        """What the tokens of an update from version ``old`` must say."""
        if self.version is None:
            return None
        return Reading(old + self.version, old + self.kv, self.signs)


FAULTS: dict[Fault, Seeded] = {
    "old embedding": Seeded("ATOMIC", HANDLED, 1, 1, ("embedding",)),
    "old MLP": Seeded("ATOMIC", HANDLED, 1, 1, ("mlp",)),
    "old head": Seeded("ATOMIC", HANDLED, 0, 1, ("embedding", "mlp", "kv")),
    "old v_proj 0": Seeded("ATOMIC", HANDLED, 1, 0),
    "old v_proj 1": Seeded("ATOMIC", HANDLED, 1, 1, ("kv",)),
    "half the buckets": Seeded("ATOMIC", FLUSHED, 1, 0, ("mlp", "kv"), bare=True),
    "no pause": Seeded("ATOMIC", (("hold", True),), 1, 0, ("mlp", "kv"), bare=True),
    "phantom": Seeded("EFFECT", HANDLED, 0, 0),
    "stale replica": Seeded("REPLICA", AWAKE, 0, 0),
    "late label": Seeded("LABEL", (("hold", True), ("hold", False)), 0, 0),
    "late abort": Seeded("LABEL", (("abort", True),), 1, 1, bare=True),
    "kept KV": Seeded("KV", (("hold", True),), 1, 0, ("kv",)),
    "stale prefix": Seeded("KV", (("drain", True), ("abort", True)), 1, 0, ("kv",), bare=True),
    "no update": Seeded("WEIGHTS", (("sleep", True),), None, bare=True, moves=False),
}


class Cell(Struct):
    """One handling and what came of it."""

    running: Running
    flush: bool
    transport: str
    fault: Fault
    invariant: str = ""
    """That the fault breaks."""
    bare: bool = False
    """Whether the answers are the bare engine's, which shares KV blocks."""
    guard: str = ""
    """What rlsched's own guards did about a fault."""
    answers: list[Answer] = []
    """Of the last attempt."""
    shown: str = ""
    """The seeded fault, as the tokens of one request tell it."""
    good: bool = False


def cells() -> Iterator[Cell]:
    """All handlings, the right ones first."""
    for running, flush in HANDLED:
        for transport in TRANSPORTS:
            yield Cell(running, flush, transport, "none")
    for running, flush in FLUSHED:
        for transport in TRANSPORTS:
            yield Cell(running, flush, transport, "none", bare=True)
    for fault, seeded in FAULTS.items():
        for running, flush in seeded.handled:
            for transport in TRANSPORTS if seeded.moves else ("",):
                # How bytes come from a disk has no part in what is done around it: one handling a fault is enough.
                if transport != "disk" or (running, flush) == seeded.handled[0]:
                    yield Cell(running, flush, transport, fault, seeded.invariant)


class Bench:
    """Two engines, a forger and the transports; make it with ``start``, end it with ``close``."""

    def __init__(self, engine: EngineClient, bare: EngineClient, ear: Ear, folder: Path) -> None:
        self._engine, self._bare, self._ear = engine, bare, ear
        self._source = Forger()
        ways = (SharedBuckets(BUCKET), BroadcastBuckets(BUCKET), Checkpoints(folder, BUCKET))
        self._transports: dict[str, Buckets] = dict(zip(TRANSPORTS, ways, strict=True))
        self._old = 0

    @classmethod
    async def start(cls, folder: Path) -> Bench:
        """Start the engines and wait until both are ready. Their errors and checkpoints go to ``folder``."""
        ear, config = Ear(), EngineConfig(model=CANARY, temperature=0.0)
        starting = (
            EngineClient.start(name, config, folder, module=f"rlsched.real.engines.{name}", on_ended=ear.hear)
            for name in ("transformers", "bare")
        )
        engine, bare = await asyncio.gather(*starting)
        return cls(engine, bare, ear, folder)

    async def close(self) -> None:
        """End and reap the engines, and let go of the transports."""
        for transport in self._transports.values():
            await transport.close()
        await asyncio.gather(self._engine.close(), self._bare.close())

    async def fill(self, cell: Cell) -> None:
        """Do what the cell says, and write into it what was seen."""
        # All residues come in turn, and neither version is one that the cell before left behind.
        self._old += 3
        if cell.fault == "none":
            cell.answers = await self._attempt(cell, self._bare if cell.bare else self._engine, careful=True)
            cell.good = not any(a.mismatches for a in cell.answers)
            return
        seeded = FAULTS[cell.fault]
        try:
            cell.answers = await self._attempt(cell, self._engine, careful=True)
        except GUARDS as objection:
            cell.guard = f"refused: {objection}"
        else:
            told = any(a.mismatches for a in cell.answers)
            cell.guard = "none" if told else "harmless here"
        if cell.guard != "none":
            cell.bare = seeded.bare
            cell.answers = await self._attempt(cell, self._bare if seeded.bare else self._engine, careful=False)
        wanted = seeded.shown(self._old)
        for answer in cell.answers:
            for mismatch in answer.mismatches:
                if not cell.good and mismatch.said == wanted:
                    claimed, said = mismatch.claimed or "nothing", mismatch.said or "no canary token"
                    cell.shown, cell.good = f"{answer.request}: {said}; claimed: {claimed}", True

    async def _attempt(self, cell: Cell, engine: EngineClient, careful: bool) -> list[Answer]:
        other = self._engine if engine is self._bare else self._bare
        shared = self._transports[TRANSPORTS[0]]
        transport = self._transports.get(cell.transport, shared)
        update = Update(self._source, transport, engine, other, self._ear, self._old, careful)
        await update.prepare(shared)
        return await update.run(cell.running, cell.flush, cell.fault)


async def matrix(wanted: Callable[[Cell], bool] = lambda _: True) -> list[Cell]:
    """Fill the cells that are wanted."""
    with TemporaryDirectory(prefix="rlsched-") as folder:
        bench = await Bench.start(Path(folder))
        try:
            chosen = [cell for cell in cells() if wanted(cell)]
            for cell in chosen:
                async with asyncio.timeout(60):
                    await bench.fill(cell)
            return chosen
        finally:
            await bench.close()
