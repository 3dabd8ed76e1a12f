"""What a step of an engine costs: integer picoseconds, a closed form for a run of steps, and its exact inverse.

A step takes ``step + seq·decoding + kv·kv_tokens + prompt·prompt_tokens``, where

* ``decoding`` counts the requests that decode one token in the step,
* ``kv_tokens`` are the tokens whose KV stood at the *start* of the step for the requests that take part in it:
  for a decoding request all its tokens but the last (that one's KV is what the step computes), for a prompt
  under way the part that earlier steps computed, for a request just admitted none,
* ``prompt_tokens`` are the prompt tokens computed in the step, re-prefilled output included.

While nobody joins or leaves, ``decoding`` stands still and ``kv_tokens`` grows by it in each step, so the time of
j steps is a quadratic in j. Integers make it equal to the sum of its steps to the last picosecond; floats do not.
"""

from math import isqrt
from typing import Self

import msgspec

from rlsched.errors import InputError

#: Picoseconds in a second.
SECOND = 10**12


class StepCosts(msgspec.Struct, frozen=True, kw_only=True):
    """The four coefficients of a step's time, each in integer picoseconds."""

    #: Per step: kernel launches, sampling, the weights' one trip through the memory bus. At least 1: time must move.
    step: int
    #: Per decoding request.
    seq: int = 0
    #: Per token in KV: what attention reads.
    kv: int = 0
    #: Per prompt token computed.
    prompt: int = 0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise InputError(f"step costs {self.step} ps: a step must take at least 1 ps")
        for name in ("seq", "kv", "prompt"):
            if getattr(self, name) < 0:
                raise InputError(f"cost '{name}' is {getattr(self, name)} ps: costs can't be negative")

    @classmethod
    def from_seconds(cls, *, step: float, seq: float = 0.0, kv: float = 0.0, prompt: float = 0.0) -> Self:
        """The costs nearest to coefficients in seconds, such as a fit to measured steps gives."""
        return cls(
            step=round(step * SECOND),
            seq=round(seq * SECOND),
            kv=round(kv * SECOND),
            prompt=round(prompt * SECOND),
        )


def step_time(costs: StepCosts, decoding: int, kv_tokens: int, prompt_tokens: int = 0) -> int:
    """Picoseconds of one step."""
    return costs.step + costs.seq * decoding + costs.kv * kv_tokens + costs.prompt * prompt_tokens


def stretch_time(costs: StepCosts, decoding: int, kv_tokens: int, steps: int) -> int:
    """Picoseconds of ``steps`` decode-only steps, the first of which starts with ``kv_tokens`` in KV."""
    first = costs.step + costs.seq * decoding + costs.kv * kv_tokens
    return steps * first + costs.kv * decoding * (steps * (steps - 1) // 2)


def steps_within(costs: StepCosts, decoding: int, kv_tokens: int, duration: int) -> int:
    """The most decode-only steps whose ``stretch_time`` is at most ``duration`` (≥ 0) picoseconds."""
    first = costs.step + costs.seq * decoding + costs.kv * kv_tokens
    growth = costs.kv * decoding
    if not growth:
        return duration // first
    # Twice the time is growth·j² + linear·j; completing the square, (2·growth·j + linear)² is at most what isqrt gets.
    linear = 2 * first - growth
    return (isqrt(linear * linear + 8 * growth * duration) - linear) // (2 * growth)
