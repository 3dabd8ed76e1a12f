"""What the matrix holds: every right handling, every seeded fault with what the tokens must say of it, and what can't
be brought about on which engine.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from msgspec import Struct

from .canary import Reading, Sign
from .canary_handling import Answer, Fault, Handling, Running
from .commands import PauseMode
from .engines import Capabilities

TRANSPORTS = ("memory", "gloo", "disk")
"""Buckets through shared memory, broadcast over gloo, and read from a checkpoint."""
WAYS: tuple[tuple[Running, PauseMode], ...] = (
    ("drain", "keep"),
    ("drain", "wait"),
    ("resubmit", "keep"),
    ("resubmit", "abort"),
    ("hold", "keep"),
    ("hold", "retract"),
)
AWAKE = tuple(Handling(running, pause, flush) for running, pause in WAYS for flush in (True, False))
HANDLED = (*AWAKE, Handling("sleep", "keep", True))  # flushed by sleeping
FLUSHED = tuple(handling for handling in AWAKE if handling.flush)
RESUBMIT, HOLD = Handling("resubmit", "keep", True), Handling("hold", "keep", True)
HELD = tuple(handling for handling in AWAKE if handling.running == "hold")
REUSED = (*(handling for handling in FLUSHED if handling not in HELD), Handling("hold", "retract", False))
"""Where a prompt comes again after the update, and a flush was promised or nothing should stand on old KV."""


class Seeded(Struct, frozen=True):
    """A seeded fault: where it can happen, and what the tokens must say."""

    invariant: str
    """The promise that it breaks; docs/canary.md says under which id the checker has it."""
    handled: tuple[Handling, ...]
    version: int | None
    """Said by the head: 0 the old version, 1 the new one. None: the tokens say nothing that these weights can say."""
    kv: int = 0
    """Said of BOS's KV: 0 or 1."""
    signs: tuple[Sign, ...] = ()
    guard: Literal["refused", "harmless here", "none"] = "refused"
    """What rlsched's own guards do about it."""
    bare: bool = False
    """Whether the way around the guards needs the careless engine; otherwise ignoring objections is enough."""
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
    "no pause": Seeded("ATOMIC", (HOLD,), 1, 0, ("mlp", "kv"), bare=True),
    "phantom": Seeded("EFFECT", HANDLED, 0, 0, guard="none"),
    "stale replica": Seeded("REPLICA", AWAKE, 0, 0, guard="none"),
    "late label": Seeded("LABEL", HELD, 0, 0, guard="none"),
    "late abort": Seeded("LABEL", (RESUBMIT,), 1, 1, guard="harmless here", bare=True),
    "kept KV": Seeded("KV", (HOLD,), 1, 0, ("kv",)),
    "stale prefix": Seeded("KV", REUSED, 1, 0, ("kv",), "harmless here", bare=True),
    "no update": Seeded("WEIGHTS", (HANDLED[-1],), None, bare=True, moves=False),
}


CANNOT: dict[tuple[str, Fault, PauseMode], str] = {
    ("vllm", "stale prefix", "retract"): "vLLM retracts by resetting its prefix cache: no old KV is left to be shared",
}
"""By engine, fault and pause mode: what can't be brought about even without guards, and why."""


class Cell(Struct):
    """One handling and what came of it."""

    handling: Handling
    transport: str
    fault: Fault
    invariant: str = ""
    """That the fault breaks."""
    bare: bool = False
    """Whether the answers are the careless engine's, which shares KV blocks."""
    guard: str = ""
    """What rlsched's own guards did about a fault."""
    old: int = 0
    """The version before the update; the new one is the next."""
    answers: list[Answer] = []
    """Of the last attempt."""
    shown: str = ""
    """The seeded fault, as the tokens of one request tell it."""
    good: bool = False

    @property
    def kv(self) -> str:
        """What becomes of KV."""
        return ("flush" if self.handling.flush else "no flush") + (", shared" if self.bare else "")

    @property
    def own(self) -> str:
        """What the library says of its tokens' versions itself: right, wrong, or nothing."""
        told = [answer.own.right for answer in self.answers if answer.own is not None]
        return "" if not told else "right" if all(told) else "wrong"


def cannot(able: Capabilities, careless: bool) -> dict[Fault, str]:
    """Faults that can't be brought about on an engine, and why. ``careless``: whether it has a careless twin."""
    found: dict[Fault, str] = {}
    for fault, seeded in FAULTS.items():
        if seeded.bare and not careless:
            found[fault] = "the guards can't be got past: this engine has no careless twin"
    if "weights" not in able.sleep_frees:
        found["no update"] = f"a level-2 sleep gives no weights back on this {able.device}: they are whole without one"
    return found


def left_out(able: Capabilities, careless: bool) -> dict[str, str]:
    """What the matrix of an engine lacks, and why."""
    modes = {pause for _, pause in WAYS} - set(able.pause_modes)
    found = {f"pause {mode}": f"this engine has {', '.join(able.pause_modes)}" for mode in sorted(modes)}
    if 2 not in able.sleep_levels:
        found["sleep"] = "this engine has no level-2 sleep"
    faults = cannot(able, careless)
    for (engine, fault, mode), why in CANNOT.items():
        if engine == able.engine and mode in able.pause_modes and fault not in faults:
            found[f"{fault}, pause {mode}"] = why
    return found | {str(fault): why for fault, why in faults.items()}


def cells(able: Capabilities, careless: bool) -> Iterator[Cell]:
    """All handlings that an engine can do, the right ones first."""

    def can(handling: Handling) -> bool:
        return handling.pause in able.pause_modes and (handling.running != "sleep" or 2 in able.sleep_levels)

    for handling in filter(can, HANDLED):
        for transport in TRANSPORTS:
            yield Cell(handling, transport, "none")
    for handling in filter(can, FLUSHED if careless else ()):
        for transport in TRANSPORTS:
            yield Cell(handling, transport, "none", bare=True)
    out = cannot(able, careless)
    for fault, seeded in FAULTS.items():
        for handling in filter(can, () if fault in out else seeded.handled):
            if (able.engine, fault, handling.pause) in CANNOT:
                continue
            for transport in TRANSPORTS if seeded.moves else ("",):
                # How bytes come from a disk has no part in what is done around it: one handling a fault is enough.
                if transport != "disk" or handling == seeded.handled[0]:
                    yield Cell(handling, transport, fault, seeded.invariant)
