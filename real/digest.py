"""Digests of weights: equal digests, bit-equal weights.

On a CPU a cryptographic hash of the bytes. On a GPU the bytes stay there: each tensor is reduced to 64 bits by integer
arithmetic, which has one result in whatever order it is added up. Digests of the two kinds are never compared, for
engine and trainer are on devices of one kind.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch

CHUNK = 1 << 24
"""Elements reduced at a time: their intermediates are 128 MiB each."""
INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the type that shows its bits."""
ODD = (-7046029254386353131, -4417276706812531889, 1609587929392839161)
"""Multipliers; odd, so that multiplying by them loses nothing."""


def digest(parameters: Mapping[str, torch.Tensor], on_gpu: bool = False) -> str:
    """Digest of names and bytes, in the order given; `on_gpu`: by fingerprints."""
    found = hashlib.blake2b(digest_size=16)
    if on_gpu:
        prints = torch.stack([fingerprint(p) for p in parameters.values()]).tolist()  # one journey to the host
        for name, value in zip(parameters, prints, strict=True):
            found.update(name.encode())
            found.update(value.to_bytes(8, "little", signed=True))
        return found.hexdigest()
    for name, parameter in parameters.items():
        found.update(name.encode())
        # A copy: a storage once seen through numpy can never be resized again, and sleeping resizes it.
        copy = parameter.detach().to("cpu", copy=True)
        found.update(copy.view(-1).view(torch.uint8).numpy())
    return found.hexdigest()


def fingerprint(tensor: torch.Tensor) -> torch.Tensor:
    """64 bits that depend on every bit of the tensor and on its place, as an integer tensor on the same device."""
    bits = tensor.detach().reshape(-1).view(INTEGERS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), CHUNK):
        part = bits[start : start + CHUNK].long()
        # Each element is mixed with its place, so that neither a changed bit nor an exchange cancels out in the sum.
        mixed = part + torch.arange(start, start + part.numel(), device=tensor.device) * ODD[0]
        mixed = _folded(mixed, 31) * ODD[1]
        mixed = _folded(mixed, 29) * ODD[2]
        total += _folded(mixed, 32).sum()
    return total


def _folded(x: torch.Tensor, n: int) -> torch.Tensor:
    """x ^ (x >> n), shifting zeros in: torch shifts the sign in, which would lose it."""
    return x ^ ((x >> n) & ((1 << (64 - n)) - 1))
