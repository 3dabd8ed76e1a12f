"""Keyed randomness: a number depends on what it is for, never on how many were drawn before it.

Two policies, and two worlds, that run the same workload under the same seed see the same lengths,
rewards and latencies (common random numbers), in whatever order they ask for them.
"""

from hashlib import blake2b
from statistics import NormalDist

_NORMAL = NormalDist()


def bits(seed: int, *key: int | str) -> int:
    """64 bits for ``key``."""
    text = "/".join(map(str, (seed, *key)))
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")


def uniform(seed: int, *key: int | str) -> float:
    """A number in (0, 1) for ``key``."""
    return (bits(seed, *key) + 0.5) / 2**64


def normal(seed: int, *key: int | str) -> float:
    """A standard normal number for ``key``."""
    return _NORMAL.inv_cdf(min(max(uniform(seed, *key), 1e-16), 1 - 1e-16))
