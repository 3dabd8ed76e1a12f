"""The six slots of a policy, as protocols, and the base that makes one stateless.

A slot is a set of pure functions. ``start`` gives its first state and ``observe`` folds facts into
it; most slots have none. ``decide`` reads the state and the ledger and answers with decisions: it
changes neither. ``promises`` is what the checker will hold the policy to.
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Literal, Protocol

from msgspec import Struct

from .decisions import Batch, Hold, Install, Move, Start, Verdict, Wait
from .facts import AnyFact
from .ledger import Ledger, Rollout
from .shape import Device, Promises, Shape

Trigger = Literal["train", "publish"]
Cause = Literal["new", "resume", "restart", "retry"]


class Slot(Struct, frozen=True, forbid_unknown_fields=True):
    """Base of the slots that come with rlsched: no state, no promises. Fields are the policy's knobs."""

    heeds_progress: ClassVar[bool] = True
    """``decide`` reads how far running groups are (what is live, finished or scored of them). If no slot
    of a policy does, none is asked after a fact that changed nothing else."""

    def start(self, shape: Shape, seed: int) -> Any:
        """The state before the first fact."""
        return None

    def observe(self, state: Any, event: AnyFact, ledger: Ledger) -> Any:
        """The state after ``event``, which ``ledger`` has in it already."""
        return state

    def promises(self, shape: Shape) -> Promises:
        """What this slot guarantees, whatever the others do."""
        return Promises()


class Aloof(Slot, frozen=True):
    """Base of slots that heed only which groups run and which are finished, versions, devices and engines."""

    heeds_progress: ClassVar[bool] = False


class Common(Protocol):
    """What every slot has."""

    def start(self, shape: Shape, seed: int) -> Any: ...

    def observe(self, state: Any, event: AnyFact, ledger: Ledger) -> Any: ...

    def promises(self, shape: Shape) -> Promises: ...


class AdmitSlot(Common, Protocol):
    """When rollouts may start, and for which prompts."""

    def decide(self, state: Any, ledger: Ledger) -> Sequence[Start]: ...


class SelectSlot(Common, Protocol):
    """Which finished groups are trained on."""

    def decide(self, state: Any, ledger: Ledger) -> Batch | Wait: ...


class ExpireSlot(Common, Protocol):
    """What becomes of old groups. Asked before a selection (``train``) and after a publish (``publish``)."""

    def decide(self, state: Any, ledger: Ledger, trigger: Trigger) -> Sequence[Verdict]: ...


class PublishSlot(Common, Protocol):
    """When new weights go out, to which engines, and what becomes of running requests."""

    def decide(self, state: Any, ledger: Ledger) -> Install | None: ...


class PlaceSlot(Common, Protocol):
    """Which devices there are, and who holds their memory."""

    def layout(self, shape: Shape) -> list[Device]: ...

    def decide(self, state: Any, ledger: Ledger) -> Sequence[Move]: ...


class RouteSlot(Common, Protocol):
    """Which engine gets a rollout that waits."""

    def decide(self, state: Any, ledger: Ledger, rollout: Rollout, cause: Cause) -> int | Hold: ...
