"""Routing: which engine gets a rollout that waits."""

from ..decisions import Hold
from ..ledger import Engine, Ledger, Rollout
from ..slot import Cause, Slot


def ready(ledger: Ledger) -> list[Engine]:
    """Engines that would compute a request sent now."""
    return [e for e in ledger.engines.values() if e.ready]


class RoundRobin(Slot, frozen=True):
    """Engines in turn, by group: siblings share an engine and its prefix cache; resumed ones go back."""

    def decide(self, state: None, ledger: Ledger, rollout: Rollout, cause: Cause) -> int | Hold:
        if rollout.engine is not None and ledger.engines[rollout.engine].serving:
            return rollout.engine if ledger.engines[rollout.engine].ready else Hold("its engine is closed")
        up = ready(ledger)
        return up[rollout.group % len(up)].id if up else Hold("no engine is open")


class LeastLoaded(Slot, frozen=True):
    """The engine with the fewest live rollouts."""

    def decide(self, state: None, ledger: Ledger, rollout: Rollout, cause: Cause) -> int | Hold:
        up = ready(ledger)
        return min(up, key=lambda e: (len(e.live), e.id)).id if up else Hold("no engine is open")
