"""What the real world keeps of a rollout: its tokens, its log-probabilities, its reward and what that is made of."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import zstandard
from msgspec import Struct

from rlsched.commands import Work

from .commands import Sample


class Span(Struct, frozen=True, array_like=True):
    """Tokens under one version."""

    version: int
    n: int


class Rollout(Struct):
    """One rollout, raw. ``logprobs`` are those of ``output``, under the versions of ``spans``."""

    rollout: int
    prompt_index: int
    sample: int
    attempt: int
    length: int
    """Tokens that are asked for in all."""
    prompt: list[int]
    output: list[int] = []
    logprobs: list[float] = []
    spans: list[Span] = []
    reward: float | None = None
    parts: dict[str, float] = {}

    def extend(self, tokens: list[int], logprobs: list[float], spans: list[Span]) -> None:
        """Append what a request made; ``spans`` divide it by versions."""
        self.output += tokens
        self.logprobs += logprobs
        self.spans += [span for span in spans if span.n]

    def sample_of(self, group: int) -> Sample:
        """As training data."""
        return Sample(self.prompt, self.output, self.logprobs, self.reward or 0.0, group)


class Rollouts:
    """The rollouts of a run. ``make`` gives prompt and length of a new one."""

    def __init__(self, make: Callable[[Work], tuple[list[int], int]]) -> None:
        self._make = make
        self._all: dict[int, Rollout] = {}

    def begin(self, work: Work) -> Rollout:
        """The rollout to generate, with exactly ``work.have`` tokens: those of a restarted one are thrown away."""
        rollout = self._all.get(work.rollout)
        if rollout is None or not work.have:
            prompt, length = self._make(work)
            rollout = Rollout(work.rollout, work.prompt, work.sample, work.attempt, length, prompt)
            self._all[work.rollout] = rollout
        if len(rollout.output) != work.have:
            raise ValueError(f"rollout {work.rollout} has {len(rollout.output)} tokens, not {work.have}")
        return rollout

    def __getitem__(self, rollout: int) -> Rollout:
        return self._all[rollout]

    def get(self, rollout: int) -> Rollout | None:
        """The rollout, if it is still needed."""
        return self._all.get(rollout)

    def forget(self, rollouts: range) -> None:
        """Drop what can't be asked for any more."""
        for r in rollouts:
            self._all.pop(r, None)


def beside(history: Path) -> Path:
    """The file of the raw rollouts of a history."""
    return history.with_name(f"{history.name.removesuffix('.zst').removesuffix('.jsonl')}.rollouts.jsonl.zst")


class RolloutLog:
    """Raw rollouts, one a line, in a file beside the history."""

    def __init__(self, history: Path) -> None:
        self.path = beside(history)
        self._file = zstandard.open(self.path, "wb")

    def write(self, rollout: Rollout) -> None:
        """Append a scored rollout."""
        self._file.write(msgspec.json.encode(rollout) + b"\n")

    def close(self) -> None:
        """End the file."""
        self._file.close()
