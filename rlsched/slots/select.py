"""Selection: which finished groups are trained on."""

from random import Random

from ..decisions import Batch, Wait
from ..ledger import Ledger
from ..shape import Promises, Shape
from ..slot import Aloof


def batch(ledger: Ledger, groups: list[int]) -> Batch:
    """The next batch of the version in the making."""
    return Batch(groups, ledger.index, ledger.index == ledger.shape.k - 1)


def short(ledger: Ledger) -> Wait:
    """Too few groups are finished."""
    return Wait(f"fewer than {ledger.shape.b} groups are finished")


class InOrder(Aloof, frozen=True):
    """Take the lowest ordinals among the groups that are not terminal: wait for the head of the line."""

    whole: bool = False
    """Wait until all of the version's groups are finished before its first batch, as verl's sync
    trainer does: ``ReplayBuffer.sample`` returns only with ``train_batch_size`` prompts."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        shape = ledger.shape
        if self.whole and ledger.unpublished + len(ledger.buffer) < shape.B:
            return Wait("the version's groups are not all finished")
        if len(ledger.buffer) < shape.b:
            return short(ledger)
        head = sorted(ledger.buffer)[: shape.b]
        first_running = next(iter(ledger.running), head[-1])
        if first_running < head[-1]:
            return Wait("an earlier group is still running")
        return batch(ledger, head)

    def promises(self, shape: Shape) -> Promises:
        return Promises(in_order=True)


class OldestFinished(Aloof, frozen=True):
    """Of the groups that are finished, take those that started first; shuffle them.

    AReaL's ``prepare_batch``: results sorted by creation time, the oldest B, shuffled. A straggler
    can be overtaken without limit.
    """

    shuffle: bool = True
    """Shuffle within the batch (AReaL: off under ``deterministic_sampling``)."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        if len(ledger.buffer) < ledger.shape.b:
            return short(ledger)
        oldest = sorted(ledger.buffer, key=lambda g: (ledger.groups[g].begun, g))[: ledger.shape.b]
        if self.shuffle:
            Random(f"{ledger.seed}/select/{ledger.x}/{ledger.index}").shuffle(oldest)
        return batch(ledger, oldest)


class FirstFinished(Aloof, frozen=True):
    """Take the groups that were accepted first: completion order, short answers ahead."""

    def decide(self, state: None, ledger: Ledger) -> Batch | Wait:
        if len(ledger.buffer) < ledger.shape.b:
            return short(ledger)
        return batch(ledger, list(ledger.buffer)[: ledger.shape.b])
