"""Memory that is really given back: storages of weights and KV dropped, taken again, and measured.

Tensors keep their shapes and everybody's references to them; only the bytes underneath go and come.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import torch

from . import cuda


def resident() -> int:
    """Bytes of physical memory that this process holds on the host."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def held(device: torch.device | str) -> int:
    """Bytes in use where the device's memory is: of this process on the host, of all processes on a GPU."""
    return cuda.used(device) if cuda.on_gpu(device) else resident()


def trim() -> None:
    """Hand freed memory back: the C library's to the operating system, torch's to the GPU's driver."""
    ctypes.CDLL(None).malloc_trim(0)
    cuda.release()


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned where the tensor is on a GPU; whole once the device has settled."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
    return copy.copy_(tensor.detach(), non_blocking=True)


class Droppable:
    """A set of tensors whose storages can be dropped and taken again."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._sizes = [(tensor, tensor.untyped_storage().nbytes()) for tensor in tensors]
        self.dropped = False

    def drop(self) -> None:
        """Give the bytes back; the contents are lost."""
        for tensor, _ in self._sizes:
            tensor.untyped_storage().resize_(0)
        self.dropped = True

    def take(self) -> None:
        """Take as many bytes again, zeroed: what was there is not."""
        with torch.no_grad():
            for tensor, size in self._sizes:
                tensor.untyped_storage().resize_(size)
                tensor.detach().zero_()
        self.dropped = False


class Parked:
    """Droppable tensors whose contents wait in host memory meanwhile."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self._tensors = list(tensors)
        self._droppable = Droppable(self._tensors)
        self._copies: list[torch.Tensor] = []

    @property
    def parked(self) -> bool:
        """Whether there are contents to restore."""
        return bool(self._copies)

    def drop(self) -> None:
        """Copy the contents to the host and give the bytes back."""
        self._copies = [host_copy(t) for t in self._tensors]
        cuda.settle(self._tensors[0].device)
        self._droppable.drop()

    def take(self) -> None:
        """Take the bytes again, with what was in them."""
        self._droppable.take()
        with torch.no_grad():
            for tensor, copy in zip(self._tensors, self._copies, strict=True):
                tensor.detach().copy_(copy, non_blocking=True)
        cuda.settle(self._tensors[0].device)
        self._copies = []
