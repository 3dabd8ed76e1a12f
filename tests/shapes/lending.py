"""Hybrid lending: while the trainer waits for groups, its devices generate, if what was measured says that it pays.

After verl's ``separate_async`` with hybrid replicas. A device of the trainer also hosts an engine. It is lent when

    groups lacking · seconds waited per group · (1 - own / (own + lent))  >  seconds to switch there and back

with means over what this run has seen, and is called back when a batch has been selected.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from rlsched.decisions import Batch, Hold, Install, Move, Wait
from rlsched.facts import AnyFact
from rlsched.ledger import Ledger, Rollout
from rlsched.policy import Policy
from rlsched.shape import Device, Shape
from rlsched.slot import Cause, Slot
from rlsched.slots.admit import Cap
from rlsched.slots.expire import Never
from rlsched.slots.publish import EveryVersion
from rlsched.slots.select import FirstFinished

SECOND = 10**9
"""Nanoseconds."""


class Measured(Struct, frozen=True):
    """What the place slot has seen."""

    now: int = 0
    """The last fact's stamp: what the ledger shows at the next fact was decided then."""
    accepted: int = 0
    groups: int = 0
    """Groups that were accepted while the trainer waited."""
    where: str = "lent"
    """Of the hybrid engines: ``kept`` by the trainer, ``lending``, ``lent``, ``taking`` back, or ``down``."""
    since: int = 0
    there: tuple[int, ...] = ()
    """Nanoseconds of the last switches: from the decision to lend until the engines take requests, …"""
    back: tuple[int, ...] = ()
    """… and from the selection of a batch until the trainer has its devices."""


class Lending(Slot, frozen=True):
    """Lends the trainer's devices while it waits, and takes them back for a batch."""

    own: int = 1
    """Engines that have devices of their own."""
    hybrid: int = 2
    """Devices of the trainer, each of which hosts an engine, too."""
    patience_s: float = 0.0
    """Seconds that the trainer has waited at least before it lends."""
    last: int = 3
    """Switches over which the cost is averaged (verl: 3)."""
    sleep: int = 2
    """Sleep level of a hybrid engine while the trainer has its device."""

    def layout(self, shape: Shape) -> list[Device]:
        """The engines' own devices, then the trainer's. They start lent, as verl's do."""
        own = [Device(e, e, False, "engine") for e in range(self.own)]
        return own + [Device(e, e, True, "engine") for e in range(self.own, self.own + self.hybrid)]

    def start(self, shape: Shape, seed: int) -> Measured:
        return Measured()

    def observe(self, state: Measured, event: AnyFact, ledger: Ledger) -> Measured:
        accepted = ledger.counters.accepted
        groups = state.groups + (accepted - state.accepted if "trainer" in ledger.waits else 0)
        seen = replace(state, now=event.t, accepted=accepted, groups=groups)
        where = _where(ledger)
        if where == state.where:
            return seen
        took = (state.now - state.since,)
        if (state.where, where) == ("lending", "lent"):
            seen = replace(seen, there=(state.there + took)[-self.last :])
        elif (state.where, where) == ("taking", "kept"):
            seen = replace(seen, back=(state.back + took)[-self.last :])
        return replace(seen, where=where, since=state.now)

    def decide(self, state: Measured, ledger: Ledger) -> list[Move]:
        holder = "trainer" if ledger.batch is not None else "engine"
        away = [d.id for d in _hybrids(ledger) if ledger.holders[d.id] != holder]
        if holder == "engine" and (ledger.update is not None or not self.pays(state, ledger)):
            return []
        return [Move(d, holder, self.sleep, fate="resume") for d in away]

    def pays(self, state: Measured, ledger: Ledger) -> bool:
        """Whether lending gains more than it costs; what was never measured counts as a gain."""
        since = ledger.wait_since.get("trainer")
        if since is None or ledger.now - since < round(self.patience_s * SECOND):
            return False
        if not (state.groups and state.there and state.back):
            return True
        waited = ledger.waited.get("trainer", 0) + ledger.now - since
        lacking = ledger.shape.b - len(ledger.buffer)
        gain = lacking * waited / state.groups * (1 - self.own / (self.own + self.hybrid))
        return gain > sum(state.there) / len(state.there) + sum(state.back) / len(state.back)


def _hybrids(ledger: Ledger) -> Iterator[Device]:
    return (d for d in ledger.devices if d.trainer)


def _where(ledger: Ledger) -> str:
    """What the hybrid engines are about."""
    engines = [ledger.engines[d.engine] for d in _hybrids(ledger) if d.engine is not None]
    if not all(e.serving for e in engines):
        return "down"
    if all(ledger.holders[d.id] == "trainer" for d in _hybrids(ledger)):
        return "lending" if "switch" in ledger.tracks else "kept"
    if "trainer" in ledger.tracks:
        return "taking"
    return "lent" if all(e.takes_requests for e in engines) else "lending"


class AtHome(EveryVersion, frozen=True):
    """Installs each version at once on the engines that have their devices; one that is lent gets it then."""

    def decide(self, state: None, ledger: Ledger) -> Install | None:
        home = {d.engine for d in ledger.devices if ledger.holders[d.id] == "engine"}
        engines = [e for e in ledger.behind() if e in home]
        update = super().decide(state, ledger)
        return replace(update, engines=engines, quorum=1) if update is not None and engines else None


class Patient(FirstFinished, frozen=True):
    """The groups that finished first. Asks again after ``patience_s``, without a fact."""

    patience_s: float = 0.0

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        choice = super().decide(state, ledger)
        if isinstance(choice, Batch):
            return choice
        since = ledger.wait_since.get("trainer", ledger.now)
        return replace(choice, until=since + round(self.patience_s * SECOND))


class Seats(Slot, frozen=True):
    """The engine with the fewest live rollouts, as long as it has a seat: who waits can still go to a lent one."""

    seats: int = 4
    """Live rollouts that an engine gets at most."""

    def decide(self, state: None, ledger: Ledger, rollout: Rollout, cause: Cause) -> int | Hold:
        free = [(len(ledger.engines[e].live), e) for e in ledger.ready]
        live, engine = min(free, default=(self.seats, -1))
        return engine if live < self.seats else Hold("no engine has a free seat")


def policy(patience_s: float = 0.1) -> Policy:
    """verl's hybrid lending, with admission as in AReaL."""
    return Policy(
        "lending",
        admit=Cap(eta=1, C=64),
        select=Patient(patience_s=patience_s),
        expire=Never(),
        publish=AtHome(),
        place=Lending(patience_s=patience_s),
        route=Seats(),
    )
