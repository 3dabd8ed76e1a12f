"""The cyclic-repeat task: after BOS and a prompt of three symbols, say the prompt again and again.

Small enough to be learned on one core in a minute, and rich enough to be wrong in every position. The 512 prompts are
split once and for all: 64 are held out for evaluation and never trained on.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import product

import msgspec

#: Changes whenever `grade` may give another number for the same answer.
GRADER = "cyclic-repeat/1"


class Task(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task and its token ids."""

    symbols: int = 8
    prompt_symbols: int = 3
    held_out: int = 64  # prompts kept for evaluation
    bos: int = 1
    eos: int = 2
    first_symbol: int = 8  # token id of symbol 0
    seed: int = 0  # of the split and of the order of the prompts

    def training_prompts(self) -> list[list[int]]:
        """All prompts that may be trained on, in a fixed order."""
        return self._shuffled()[self.held_out :]

    def evaluation_prompts(self) -> list[list[int]]:
        """The held-out prompts, in a fixed order."""
        return self._shuffled()[: self.held_out]

    def _shuffled(self) -> list[list[int]]:
        ids = range(self.first_symbol, self.first_symbol + self.symbols)
        prompts = [[self.bos, *combination] for combination in product(ids, repeat=self.prompt_symbols)]
        random.Random(f"split/{self.seed}").shuffle(prompts)
        return prompts

    def prompt(self, index: int) -> list[int]:
        """Training prompt number `index` (0, 1, ...): every epoch is a new permutation of all of them."""
        prompts = self.training_prompts()
        epoch, place = divmod(index, len(prompts))
        order = list(range(len(prompts)))
        random.Random(f"epoch/{self.seed}/{epoch}").shuffle(order)
        return prompts[order[place]]


class Grade(msgspec.Struct, frozen=True):
    """A reward and what it is made of."""

    total: float  # what is trained on: equals `correct`
    components: dict[str, float]
    # "correct": right positions as a share of the positions asked for; missing ones are wrong, surplus ones ignored
    # "length": tokens given as a share of those asked for, at most 1


def answer(prompt: Sequence[int], length: int) -> list[int]:
    """The right answer of `length` tokens to a prompt that begins with BOS."""
    symbols = prompt[1:]
    return [symbols[i % len(symbols)] for i in range(length)]


def grade(prompt: Sequence[int], output: Sequence[int], length: int) -> Grade:
    """Grade `output` against the right answer of `length` (>= 1) tokens."""
    right = sum(given == wanted for given, wanted in zip(output, answer(prompt, length), strict=False))
    correct = right / length
    return Grade(correct, {"correct": correct, "length": min(1.0, len(output) / length)})
