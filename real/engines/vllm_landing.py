"""A landing as vLLM's worker takes it: all parameters in shared memory, under their Hugging Face names."""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from ..weights import extent
from .landing import Landing

Place = tuple[str, str, list[int], int]
"""Name, torch dtype, shape, and offset in bytes of a parameter in a buffer."""


class Handed(NamedTuple):
    """Parameters in a file that is in memory."""

    path: str
    size: int
    places: list[Place]


class VllmLanding(Landing):
    """Weights of one engine, for a worker in another process."""

    @contextmanager
    def handed(self) -> Iterator[Handed]:
        """The parameters in shared memory, as long as this lasts."""
        parameters = self.weights.parameters
        # Aligned to their elements they may need a little more than their bytes.
        (bucket,) = self.weights.buckets(self.weights.nbytes + 8 * len(parameters))
        size = extent(parameters, bucket)
        file = os.memfd_create(f"rlsched-{os.getpid()}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(file, size)
            self.weights.pack(torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8), bucket)
            places = [
                (p.name, str(parameters[p.name].dtype).removeprefix("torch."), list(parameters[p.name].shape), p.offset)
                for p in bucket
            ]
            yield Handed(f"/proc/{os.getpid()}/fd/{file}", size, places)
        finally:
            os.close(file)

    def digest(self) -> str:
        """What the worker's digest of the same weights is."""
        return digest(self.weights.parameters)


def lying(buffer: torch.Tensor, dtype: str, shape: list[int], offset: int) -> torch.Tensor:
    """A parameter as it lies in a buffer of bytes."""
    kind: torch.dtype = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    return buffer[offset : offset + count * kind.itemsize].view(kind).view(shape)


def digest(parameters: Mapping[str, torch.Tensor]) -> str:
    """Digest of names and bytes, in the order given; zeros count as positive."""
    summed = hashlib.blake2b(digest_size=16)
    for name, parameter in parameters.items():
        summed.update(name.encode())
        summed.update((parameter.detach().cpu() + 0.0).contiguous().view(-1).view(torch.uint8).numpy())
    return summed.hexdigest()
