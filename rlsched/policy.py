"""A policy: a frozen product of six slots.

In Python: ``replace(areal_async(), admit=Cap(eta=1))``. On the command line see ``naming``.
"""

from collections.abc import Callable, Iterator
from typing import Any

from msgspec import Struct, convert, to_builtins
from msgspec.structs import replace

from .errors import InputError, PolicyError
from .shape import Device, Promises, Shape, merge
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
        """What the checker holds this policy to. Raises InputError when its slots contradict each other."""
        found = []
        for name, slot in self.slots():
            found.append(promise := self.ask(name, slot.promises, shape))
            if not isinstance(promise, Promises):
                raise self.error(name, f"promises returned {promise!r}")
        whole = merge(found)
        if whole.quiet and whole.partial in ("retract", "keep"):
            raise InputError(
                f"policy {self.name}: publish.fate is {whole.partial}, but place ({type(self.place).__name__}) lets"
                " nothing run until a version is out, and puts engines to sleep: choose drain, resume or restart"
            )
        return whole

    def layout(self, shape: Shape) -> list[Device]:
        """The devices, as the place slot lays them out: numbered from 0, with an engine and a trainer among them."""
        devices: list[Device] = self.ask("place", lambda: convert(to_builtins(self.place.layout(shape)), list[Device]))
        engines = [d.engine for d in devices if d.engine is not None]
        if [d.id for d in devices] != [*range(len(devices))] or len({*engines}) < len(engines):
            raise self.error("place", "its layout must number devices 0, 1, … and give each engine one of its own")
        if not engines or not any(d.trainer for d in devices):
            raise self.error("place", "its layout has no engine or no trainer")
        return devices

    def ask(self, name: str, question: Callable[..., Any], *args: Any) -> Any:
        """The answer of slot ``name``. Raises PolicyError when it raises anything."""
        try:
            return question(*args)
        except PolicyError:
            raise
        except Exception as error:
            raise self.error(name, f"{type(error).__name__}: {error}") from error

    def error(self, name: str, what: str) -> PolicyError:
        """What is wrong with slot ``name``."""
        return PolicyError(f"policy {self.name}, slot {name} ({type(getattr(self, name)).__name__}): {what}")


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
