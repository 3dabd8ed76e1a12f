"""Memory that is really given back: storages of weights and KV dropped, taken again, and measured.

Tensors keep their shapes and everybody's references to them; only the bytes underneath go and come.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable
from pathlib import Path

import torch


def resident() -> int:
    """Bytes of physical memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def trim() -> None:
    """Make the C library hand freed memory back to the operating system."""
    ctypes.CDLL(None).malloc_trim(0)


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
