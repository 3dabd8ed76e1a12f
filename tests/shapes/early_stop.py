"""Early stop: more groups are started than a version needs, and once it is full the rest is cancelled.

RollPacker's tail batching, on shared devices. The prompts that were cancelled wait in the queue ``tail``; every n-th
version is made of them, with nothing to spare, so that long answers come together and keep nobody else waiting.
"""

from itertools import islice

from rlsched.decisions import Batch, Start, Verdict, Wait
from rlsched.ledger import Ledger
from rlsched.policy import Policy
from rlsched.shape import Promises, Shape
from rlsched.slot import Slot, Trigger
from rlsched.slots.place import Colocated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import LeastLoaded
from rlsched.slots.select import FirstFinished


class Rounds(Slot, frozen=True):
    """Short rounds of fresh prompts with groups and samples to spare; every ``every``-th is a long one, with none."""

    every: int = 4
    """Every n-th version is made from the queue ``tail``, as far as that goes."""
    groups: int = 4
    """Groups that a short round starts beyond B."""
    samples: int = 1
    """Samples that a group of a short round starts beyond those that make it whole."""

    def decide(self, state: None, ledger: Ledger) -> list[Start]:
        long = (ledger.v + 1) % self.every == 0
        queue, spare = ("tail", 0) if long else ("retry", self.samples)
        now, then = ledger.counters, ledger.at_publish
        begun = (now.admitted - then.admitted) - (now.rejected - then.rejected)
        wanted = ledger.shape.B + (0 if long else self.groups) - begun
        need = ledger.shape.samples
        return [Start(p.id, need, need + spare, queue=queue) for p in islice(ledger.upcoming(queue), max(0, wanted))]

    def promises(self, shape: Shape) -> Promises:
        most = shape.B + self.groups
        return Promises(eta=-(-most // shape.B) - 1, concurrency=most, on_policy=True)


class Full(FirstFinished, frozen=True):
    """The groups that finished first, once there are enough of them for the whole version."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        if ledger.unpublished + len(ledger.buffer) < ledger.shape.B:
            return Wait("the version is not full")
        return super().decide(state, ledger)


class CancelRest(Slot, frozen=True):
    """When the version is full, what still runs goes to the queue ``tail``, and so does what finished too late."""

    def decide(self, state: None, ledger: Ledger, trigger: Trigger) -> list[Verdict]:
        lacking = ledger.shape.B - ledger.unpublished
        if trigger != "train" or len(ledger.buffer) < lacking:
            return []
        rest = [*list(ledger.buffer)[lacking:], *ledger.running]
        return [Verdict(g, "requeue", "the version is full", queue="tail") for g in rest]


def policy() -> Policy:
    """RollPacker's tail batching."""
    return Policy(
        "early-stop",
        admit=Rounds(),
        select=Full(),
        expire=CancelRest(),
        publish=EveryVersion(transport="ipc", fate="drain"),
        place=Colocated(),
        route=LeastLoaded(),
    )
