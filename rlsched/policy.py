"""A policy: a frozen product of six slots.

In Python: ``replace(areal_async(), admit=Cap(eta=1))``. On the command line see ``naming``.
"""

from collections.abc import Iterator

from msgspec import Struct
from msgspec.structs import replace

from .shape import Promises, Shape, merge
from .slot import AdmitSlot, Common, ExpireSlot, PlaceSlot, PublishSlot, RouteSlot, SelectSlot
from .slots.admit import Barrier, Cap
from .slots.expire import Never
from .slots.place import Colocated, Disaggregated
from .slots.publish import EveryVersion
from .slots.route import RoundRobin
from .slots.select import InOrder, OldestFinished

SLOTS = ("admit", "select", "expire", "publish", "place", "route")


class Policy(Struct, frozen=True):
    """When rollouts start, which are trained, what becomes of old ones, when weights go out, who holds
    the memory, and which engine gets what."""

    name: str
    admit: AdmitSlot
    select: SelectSlot
    expire: ExpireSlot
    publish: PublishSlot
    place: PlaceSlot
    route: RouteSlot

    def slots(self) -> Iterator[tuple[str, Common]]:
        """The slots with their names, in the order of the fields."""
        for name in SLOTS:
            yield name, getattr(self, name)

    def promises(self, shape: Shape) -> Promises:
        """What the checker holds this policy to."""
        return merge([slot.promises(shape) for _, slot in self.slots()])


def verl_hybrid() -> Policy:
    """verl v0.9.1, HYBRID mode, sync trainer: same GPUs in turn, full batch, level-2 sleep.

    As in the document that rlsched follows, parameters and optimizer are offloaded; verl's own
    defaults leave both on the GPU (``place.offload=[]``).
    """
    return Policy(
        "verl-hybrid",
        admit=Barrier(),
        select=InOrder(whole=True),
        expire=Never(),
        publish=EveryVersion(transport="ipc", bucket_mb=2048, fate="drain"),
        place=Colocated(),
        route=RoundRobin(),
    )


def areal_async() -> Policy:
    """AReaL v2.1.0, disaggregated: admission cap with η = 0 and C = B, training while engines generate,
    running requests aborted and resumed at an update."""
    return Policy(
        "areal-async",
        admit=Cap(),
        select=OldestFinished(),
        expire=Never(),
        publish=EveryVersion(),
        place=Disaggregated(),
        route=RoundRobin(),
    )


def presets() -> dict[str, Policy]:
    """The policies that come with rlsched, by name."""
    return {p.name: p for p in (verl_hybrid(), areal_async())}


__all__ = ["SLOTS", "Policy", "areal_async", "presets", "replace", "verl_hybrid"]
