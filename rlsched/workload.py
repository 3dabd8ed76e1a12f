"""The workload: lengths, reward latencies and filters, the same in every world.

In compared runs the length of a rollout is forced (end-of-sequence is ignored), so that a real
engine generates what the simulator does.
"""

from math import exp, sqrt
from typing import Literal

from msgspec import Struct

from .errors import InputError
from .keyed import normal, uniform


class Length(Struct, frozen=True, forbid_unknown_fields=True):
    """A distribution of token counts, clipped to 1 … ``most``."""

    kind: Literal["fixed", "lognormal"] = "fixed"
    """``fixed``: always the mean; ``lognormal``: the usual shape of answers, a few of them long."""
    mean: float = 128.0
    """Mean before clipping, in tokens."""
    sigma: float = 0.6
    """Standard deviation of the logarithm (lognormal only)."""
    group: float = 0.5
    """Share of that variance that all samples of a prompt have in common, 0 … 1."""
    most: int | None = None
    """Longest, in tokens; None: the shape's budget for outputs, no limit for prompts."""

    def __post_init__(self) -> None:
        if self.mean < 1:
            raise InputError(f"workload: a mean length of {self.mean} tokens; it must be at least 1")
        if self.sigma < 0 or not 0 <= self.group <= 1:
            raise InputError("workload: a length's sigma must be at least 0 and its group share within 0 … 1")
        if self.most is not None and self.most < 1:
            raise InputError(f"workload: a longest length of {self.most} tokens; it must be at least 1")

    def draw(self, shared: float, own: float) -> int:
        """The length for two standard normal numbers: the group's and the sample's."""
        if self.kind == "fixed":
            tokens = self.mean
        else:
            z = sqrt(self.group) * shared + sqrt(1 - self.group) * own
            tokens = self.mean * exp(self.sigma * z - self.sigma**2 / 2)
        return max(1, min(round(tokens), self.most if self.most is not None else 1 << 62))


class Workload(Struct, frozen=True, forbid_unknown_fields=True):
    """What there is to generate. All draws are keyed by (seed, prompt, sample, attempt)."""

    prompt: Length = Length(mean=64.0)
    """Prompt tokens; the samples of a prompt share it."""
    output: Length = Length(kind="lognormal", mean=128.0)
    """New tokens of a rollout."""
    reward_s: float = 0.0
    """Latency of a reward in seconds, the same for each."""
    reject: float = 0.0
    """Share of groups that a filter rejects, 0 … 1. It never depends on rewards."""

    def __post_init__(self) -> None:
        if self.prompt.kind == "lognormal" and self.prompt.most is None:
            raise InputError("workload.prompt.most is missing: a lognormal prompt length needs a longest one")
        if self.reward_s < 0:
            raise InputError(f"workload.reward_s is {self.reward_s}: it must be at least 0")
        if not 0 <= self.reject < 1:
            raise InputError(f"workload.reject is {self.reject}: it must be within 0 … 1, 1 excluded")

    def prompt_tokens(self, seed: int, prompt: int) -> int:
        """Length of ``prompt`` in tokens."""
        if self.prompt.kind == "fixed":
            return self.prompt.draw(0.0, 0.0)
        return self.prompt.draw(normal(seed, "prompt", prompt), 0.0)

    def output_tokens(self, seed: int, prompt: int, sample: int, attempt: int, budget: int) -> int:
        """New tokens of one rollout, at most ``budget``."""
        if self.output.kind == "fixed":
            return min(budget, self.output.draw(0.0, 0.0))
        shared = normal(seed, "group", prompt, attempt) if self.output.group else 0.0
        own = normal(seed, "sample", prompt, sample, attempt) if self.output.group < 1 else 0.0
        return min(budget, self.output.draw(shared, own))

    def kept(self, seed: int, prompt: int, attempt: int) -> bool:
        """Whether the filter keeps the group."""
        return self.reject == 0 or uniform(seed, "keep", prompt, attempt) >= self.reject

    def longest(self, budget: int) -> tuple[int, int]:
        """Most prompt tokens that can be promised, and most new ones."""
        prompt = self.prompt.most or round(self.prompt.mean)
        return prompt, min(budget, self.output.most or budget)
