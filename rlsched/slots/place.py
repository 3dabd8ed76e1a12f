"""Placement: which devices there are, and who holds their memory."""

from typing import Literal

from ..commands import Part
from ..decisions import Move
from ..errors import InputError
from ..ledger import Ledger
from ..shape import Device, Promises, Shape
from ..slot import Aloof

PARTS: tuple[Part, ...] = ("parameters", "optimizer")


class Colocated(Aloof, frozen=True):
    """Engines and trainer take turns on the same devices: verl's HYBRID mode.

    The trainer gets every device when a batch is selected, and the engines get theirs back with
    the new weights.
    """

    engines: int | None = None
    """Engines, each on a device of its own; None: the shape's."""
    sleep: int = 2
    """Sleep level while the trainer has the device: 2 discards the weights, 1 keeps them on the host."""
    load: tuple[Part, ...] = ("parameters", "optimizer")
    """Trainer parts that are brought back before training (verl: only with ``param_offload``)."""
    offload: tuple[Part, ...] = ("optimizer", "parameters")
    """Trainer parts that leave: the first before weights wake up, the others before the KV cache does."""

    def __post_init__(self) -> None:
        if self.engines is not None and self.engines < 1:
            raise InputError(f"place.engines is {self.engines}: it must be at least 1, or left out for the shape's")
        if self.sleep not in (1, 2):
            raise InputError(f"place.sleep is {self.sleep}: the levels are 1 and 2")

    def layout(self, shape: Shape) -> list[Device]:
        stay = [part for part in PARTS if part not in self.offload]
        return [Device(e, e, True, "engine", stay) for e in range(self.engines or shape.engines)]

    def decide(self, state: None, ledger: Ledger) -> list[Move]:
        if ledger.batch is None and ledger.update is None:
            return []
        if ledger.batch is not None and ledger.unpublished + len(ledger.buffer) < ledger.shape.B:
            return []  # the engines still have to make the rest of the version
        if ledger.batch is not None and ledger.lost():
            return []  # or what a crash took away
        holder: Literal["engine", "trainer"] = "trainer" if ledger.batch is not None else "engine"
        return [
            Move(d.id, holder, self.sleep, self.load, self.offload)
            for d in ledger.devices
            if ledger.holders[d.id] != holder
        ]

    def promises(self, shape: Shape) -> Promises:
        return Promises(quiet=True)


class Disaggregated(Aloof, frozen=True):
    """Engines and trainer have devices of their own: AReaL's mode."""

    engines: int | None = None
    """Engines, each on a device of its own; None: the shape's."""
    trainers: int = 1
    """Devices of the trainer."""

    def __post_init__(self) -> None:
        if self.engines is not None and self.engines < 1:
            raise InputError(f"place.engines is {self.engines}: it must be at least 1, or left out for the shape's")
        if self.trainers < 1:
            raise InputError(f"place.trainers is {self.trainers}: it must be at least 1")

    def layout(self, shape: Shape) -> list[Device]:
        engines = self.engines or shape.engines
        pool = [Device(e, e, False, "engine") for e in range(engines)]
        return pool + [Device(engines + i, None, True, "trainer", [*PARTS]) for i in range(self.trainers)]

    def decide(self, state: None, ledger: Ledger) -> list[Move]:
        return []
