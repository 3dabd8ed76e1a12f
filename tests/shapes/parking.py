"""Parking: more groups run than a version needs, and once it is full the rest waits, with its tokens, for the next.

APRIL's active partial rollouts, and Kimi k1.5's. A rollout may so be made by several versions, one after the other.
"""

from rlsched.decisions import Batch, Start, Verdict, Wait
from rlsched.ledger import Ledger
from rlsched.policy import Policy
from rlsched.shape import Promises, Shape
from rlsched.slot import Slot, Trigger
from rlsched.slots.admit import starts
from rlsched.slots.place import Colocated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import LeastLoaded
from rlsched.slots.select import FirstFinished


class Surplus(Slot, frozen=True):
    """Keep ``groups`` more than B in hand; start none from the moment a version is full until it is published."""

    groups: int = 4
    """Groups beyond B (APRIL: its over-provisioned requests)."""

    def decide(self, state: None, ledger: Ledger) -> list[Start]:
        if ledger.batch is not None or ledger.unpublished:
            return []
        return starts(ledger, ledger.shape.B + self.groups - len(ledger.running) - len(ledger.buffer))

    def promises(self, shape: Shape) -> Promises:
        most = shape.B + self.groups
        return Promises(eta=-(-most // shape.B) - 1, concurrency=most)


class Full(FirstFinished, frozen=True):
    """The groups that finished first, once there are enough of them for the whole version."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        if ledger.unpublished + len(ledger.buffer) < ledger.shape.B:
            return Wait("the version is not full")
        return super().decide(state, ledger)


class ParkRest(Slot, frozen=True):
    """When the version is full, what still runs is parked until it is published."""

    def decide(self, state: None, ledger: Ledger, trigger: Trigger) -> list[Verdict]:
        if trigger != "train" or ledger.unpublished + len(ledger.buffer) < ledger.shape.B:
            return []
        return [Verdict(g, "park", "the version is full") for g in ledger.running]


def policy() -> Policy:
    """APRIL, on shared devices."""
    return Policy(
        "parking",
        admit=Surplus(),
        select=Full(),
        expire=ParkRest(),
        publish=EveryVersion(transport="ipc", fate="resume"),
        place=Colocated(),
        route=LeastLoaded(),
    )
