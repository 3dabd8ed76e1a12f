"""Admission: when rollouts may start."""

from itertools import islice

from ..decisions import Start
from ..errors import InputError
from ..ledger import Ledger
from ..shape import Promises, Shape
from ..slot import Aloof
from ..staleness import capacity


def starts(ledger: Ledger, n: int, extra: int = 0) -> list[Start]:
    """Start the next ``n`` prompts with ``extra`` samples more than a whole group needs."""
    need = ledger.shape.samples
    return [Start(p.id, need, need + extra) for p in islice(ledger.upcoming(), max(0, n))]


class Barrier(Aloof, frozen=True):
    """Admit one version's groups, B, when its predecessor is published, and then none until it is.

    verl's sync trainer. A rejected or dropped group is replaced at once.
    """

    def decide(self, state: None, ledger: Ledger) -> list[Start]:
        out = ledger.unpublished + len(ledger.buffer) + len(ledger.running)
        return starts(ledger, ledger.shape.B - out)

    def promises(self, shape: Shape) -> Promises:
        return Promises(eta=0, concurrency=shape.B, on_policy=True)


class Cap(Aloof, frozen=True):
    """AReaL's staleness manager: admit while capacity remains.

    The cap limits how many groups are out, not how old one may be: see P1 and P2 in the invariants.
    """

    eta: int = 0
    """Versions that admission may run ahead (AReaL: ``max_head_offpolicyness``, 0)."""
    C: int | None = None
    """Most groups running at once; None: B (AReaL: ``max_concurrent_rollouts``, None)."""

    def __post_init__(self) -> None:
        if self.eta < 0:
            raise InputError(f"admit.eta is {self.eta}: it must be at least 0")
        if self.C is not None and self.C < 1:
            raise InputError(f"admit.C is {self.C}: it must be at least 1, or left out for B")

    def decide(self, state: None, ledger: Ledger) -> list[Start]:
        return starts(
            ledger,
            capacity(self.eta, self.C, ledger.shape.B, ledger.v, ledger.accepted, len(ledger.running)),
        )

    def promises(self, shape: Shape) -> Promises:
        return Promises(
            eta=self.eta,
            concurrency=shape.B if self.C is None else self.C,
            on_policy=self.eta == 0,
        )
