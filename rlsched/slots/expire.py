"""Expiry: what becomes of old groups."""

from ..decisions import Verdict
from ..errors import InputError
from ..ledger import Ledger
from ..shape import Promises, Shape
from ..slot import Aloof, Trigger


class Never(Aloof, frozen=True):
    """Keep everything, as AReaL and verl's sync trainer do."""

    def decide(self, state: None, ledger: Ledger, trigger: Trigger) -> list[Verdict]:
        return []


class AgeBound(Aloof, frozen=True):
    """Drop what is older than ``bound`` versions when training on it could begin.

    verl's ``max_off_policy_threshold`` K with strategy ``drop`` is ``bound`` = K - 1. Dropping on
    age biases the data toward short answers: look at the trained lengths.
    """

    bound: int = 4
    """Largest age that is trained, in versions."""
    requeue: bool = False
    """Give the prompt another attempt."""

    def __post_init__(self) -> None:
        if self.bound < 0:
            raise InputError(f"expire.bound is {self.bound}: it must be at least 0")

    def decide(self, state: None, ledger: Ledger, trigger: Trigger) -> list[Verdict]:
        if trigger != "train":
            return []
        old = [(g, a) for g in ledger.buffer if (a := ledger.age(g)) > self.bound]
        return [Verdict(g, "requeue" if self.requeue else "drop", f"age {a}") for g, a in old]

    def promises(self, shape: Shape) -> Promises:
        return Promises(age=self.bound)
