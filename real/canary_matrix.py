"""The matrix of handlings on one engine: what becomes of running requests x pause mode x flush or keep x transport x
fault, and what the tokens said of each.

A right handling must decode what was claimed. A wrong one is first tried as rlsched would: a guard may refuse it, or
make it harmless. What is refused or harmless is done again behind the guards' back, by a handler that ignores
objections, where needed on the engine's careless twin; then the tokens must show the very fault that was seeded, and
not just any contradiction. A guard that does anything else than `FAULTS` says is a miss as well. The library's own
labels are held against the tokens, too: they are reported and fail nothing, because no claim rests on them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from rlsched.errors import WorldError

from .canary_faults import FAULTS, TRANSPORTS, Cell, cells, left_out
from .canary_forger import Forger
from .canary_handling import GUARDS, Answer, Ear, Early, Update
from .channel import CommandFailed
from .child import ChildDied
from .client import EngineClient
from .config import EngineConfig
from .installs import RECIPES, EngineKind, require
from .model import CANARY
from .transport import BroadcastBuckets, Buckets, Checkpoints, SharedBuckets

BUCKET = 1 << 16
"""Bytes of a bucket: eleven to a version, so that half of them is about half."""
PATIENCE_S = 60.0
"""Longest answer to one order of a transfer, on a machine that others use, too."""
CELL_S = 180.0
"""Longest cell; it only turns a hang into a failure."""
TRIES = 3
"""Of a cell whose running request ended too early."""

CARELESS: dict[EngineKind, str] = {
    "transformers": "rlsched.real.engines.bare",
    "vllm": "rlsched.real.engines.vllm_bare",
    "sglang": "rlsched.real.engines.sglang_sharing",
}
"""Modules of the engines' careless twins. An engine without one is its own second replica."""


class Matrix(Struct):
    """All that was done on one engine."""

    engine: EngineKind
    version: str
    """Of its library."""
    device: str
    pause_modes: list[str]
    cells: list[Cell]
    left_out: dict[str, str]
    """Faults and handlings that can't be brought about here, and why."""

    @property
    def good(self) -> bool:
        """Whether every right handling decodes what it claims and every wrong one is caught."""
        return bool(self.cells) and all(cell.good for cell in self.cells)


class Bench:
    """Two engines, a forger and the transports; make it with ``start``, end it with ``close``."""

    def __init__(self, engine: EngineClient, bare: EngineClient, careless: bool, ear: Ear, folder: Path) -> None:
        self._engine, self._bare, self._ear = engine, bare, ear
        self._careless = careless
        self._source = Forger()
        ways = (
            SharedBuckets(BUCKET),
            BroadcastBuckets(BUCKET, PATIENCE_S),
            Checkpoints(folder, BUCKET),
        )
        self._transports: dict[str, Buckets] = dict(zip(TRANSPORTS, ways, strict=True))
        self._old = 0

    @classmethod
    async def start(cls, folder: Path, kind: EngineKind = "transformers") -> Bench:
        """Start the engines and wait until both are ready. Their errors and checkpoints go to ``folder``.

        Raises InputError if the engine isn't installed.
        """
        recipe, python = RECIPES[kind], require(kind).interpreter
        ear, config = Ear(), EngineConfig(model=CANARY, temperature=0.0)
        starting = [
            asyncio.ensure_future(
                EngineClient.start(
                    name,
                    config,
                    folder,
                    module=module,
                    interpreter=python,
                    environment=recipe.environment,
                    on_ended=ear.hear,
                    on_down=ear.fall,
                )
            )
            for name, module in (("engine", recipe.module), ("bare", CARELESS.get(kind, recipe.module)))
        ]
        try:
            engine, bare = await asyncio.gather(*starting)
        except BaseException:
            for client in await asyncio.gather(*starting, return_exceptions=True):
                if isinstance(client, EngineClient):
                    await client.close()
            raise
        return cls(engine, bare, kind in CARELESS, ear, folder)

    async def close(self) -> None:
        """End and reap the engines, and let go of the transports."""
        for transport in self._transports.values():
            await transport.close()
        await asyncio.gather(self._engine.close(), self._bare.close())

    def matrix(self, kind: EngineKind, wanted: Callable[[Cell], bool]) -> Matrix:
        """The cells that are wanted, of those that this engine can do."""
        able = self._engine.capabilities
        return Matrix(
            kind,
            able.version,
            able.device,
            list(able.pause_modes),
            [cell for cell in cells(able, self._careless) if wanted(cell)],
            left_out(able, self._careless),
        )

    async def fill(self, cell: Cell) -> None:
        """Do what the cell says, and write into it what was seen. Raises Early if thrice in a row it can't be done."""
        for _ in range(TRIES - 1):
            with suppress(Early):
                await self._fill(cell)
                return
        await self._fill(cell)

    async def _fill(self, cell: Cell) -> None:
        # All residues come in turn, and neither version is one that the cell before left behind.
        self._old += 3
        cell.old = self._old
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
                if not cell.shown and mismatch.said == wanted:
                    claimed, said = mismatch.claimed or "nothing", mismatch.said or "no canary token"
                    cell.shown = f"{answer.request}: {said}; claimed: {claimed}"
        cell.good = bool(cell.shown) and cell.guard.partition(":")[0] == seeded.guard

    async def _attempt(self, cell: Cell, engine: EngineClient, careful: bool) -> list[Answer]:
        other = self._engine if engine is self._bare else self._bare
        shared = self._transports[TRANSPORTS[0]]
        transport = self._transports.get(cell.transport, shared)
        update = Update(self._source, transport, engine, other, self._ear, self._old, careful)
        await update.prepare(shared)
        return await update.run(cell.handling, cell.fault)


async def matrix(
    kind: EngineKind = "transformers",
    wanted: Callable[[Cell], bool] = lambda _: True,
    say: Callable[[str], None] = lambda _: None,
) -> Matrix:
    """Fill the cells that are wanted, on one engine; ``say`` is told how far it has come.

    Raises InputError if the engine isn't installed, WorldError if it fails at anything but what a cell is about.
    """
    with TemporaryDirectory(prefix="rlsched-") as folder:
        say(f"{kind}: starting two engines")
        try:
            bench = await Bench.start(Path(folder), kind)
        except ChildDied as error:
            raise WorldError(f"canary on {kind}: {error}") from error
        try:
            found = bench.matrix(kind, wanted)
            before = ""
            for done, cell in enumerate(found.cells):
                if cell.fault != before:
                    before = cell.fault
                    what = "right handlings" if before == "none" else before
                    say(f"{kind}: {what} ({done} of {len(found.cells)} cells done)")
                try:
                    async with asyncio.timeout(CELL_S):
                        await bench.fill(cell)
                except (*GUARDS, ChildDied, CommandFailed, Early, TimeoutError) as error:
                    h = cell.handling
                    where = f"{cell.fault}, {h.running}, pause {h.pause}, {cell.kv}, {cell.transport}"
                    raise WorldError(f"canary on {kind}: {where}: {str(error) or type(error).__name__}") from error
            return found
        finally:
            await bench.close()
