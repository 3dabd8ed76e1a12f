"""Routing: which engine gets a rollout that waits."""

from ..decisions import Hold
from ..ledger import Ledger, Rollout
from ..slot import Aloof, Cause, Slot


class RoundRobin(Aloof, frozen=True):
    """Engines in turn, by group: siblings share an engine and its prefix cache; resumed ones go back."""

    def decide(self, state: None, ledger: Ledger, rollout: Rollout, cause: Cause) -> int | Hold:
        home = rollout.engine
        if home is not None and ledger.engines[home].serving and ledger.engines[home].awake:
            return home if ledger.engines[home].takes_requests else Hold("its engine is closed")
        up = ledger.ready
        return up[rollout.group % len(up)] if up else Hold("no engine is open")


class LeastLoaded(Slot, frozen=True):
    """The engine with the fewest live rollouts."""

    def decide(self, state: None, ledger: Ledger, rollout: Rollout, cause: Cause) -> int | Hold:
        if not ledger.ready:
            return Hold("no engine is open")
        return min(ledger.ready, key=lambda e: (len(ledger.engines[e].live), e))
