"""Skewed installs: each engine takes a new version in when that is convenient for it, and none lags too far behind.

Laminar's trajectory-level asynchrony. A version is out with its first engine; the others follow when little runs on
them, or when the next one that comes out would leave them too far behind. A rollout is of one version.
"""

from rlsched.commands import Transport
from rlsched.decisions import Install
from rlsched.ledger import Ledger
from rlsched.policy import Policy
from rlsched.shape import Promises, Shape
from rlsched.slot import Slot
from rlsched.slots.admit import Cap
from rlsched.slots.expire import Never
from rlsched.slots.place import Disaggregated
from rlsched.slots.route import LeastLoaded
from rlsched.slots.select import InOrder


class OneByOne(Slot, frozen=True):
    """Installs the trained version on one engine at a time."""

    skew: int = 2
    """Versions by which an engine may lag behind the published one."""
    few: int = 1
    """An engine with at most so many live rollouts can take a version in."""
    transport: Transport = "broadcast"
    """How weights go out."""
    bucket: int = 2**30
    """Bytes of a bucket."""

    def decide(self, state: None, ledger: Ledger) -> Install | None:
        engines = ledger.engines
        behind = sorted(ledger.behind(), key=lambda e: (len(engines[e].live), e))
        late = [e for e in behind if engines[e].installed < ledger.x - self.skew]
        idle = [e for e in behind if len(engines[e].live) <= self.few]
        due = late or idle or (behind if ledger.x > ledger.v else [])
        if not due:
            return None
        holders = len(ledger.serving()) - len(behind)
        quorum = max(1, holders + len(late))  # none may be left too far behind
        return Install(ledger.x, due[:1], self.transport, self.bucket, "drain", flush=True, quorum=quorum)

    def promises(self, shape: Shape) -> Promises:
        return Promises(partial="drain", flush=True, skew=self.skew)


def policy() -> Policy:
    """Laminar's way, with a cap on admission."""
    return Policy(
        "skewed",
        admit=Cap(eta=2, C=64),
        select=InOrder(),
        expire=Never(),
        publish=OneByOne(),
        place=Disaggregated(),
        route=LeastLoaded(),
    )
