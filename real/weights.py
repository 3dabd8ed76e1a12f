"""The children's half of a weight transfer: a model's parameters as named bytes.

Trainer and engine lay their parameters into buckets by the same plan, in name order; a bucket is a run of bytes that
the trainer packs and the engine copies in place, bit for bit. How the bytes travel is the group's or the mapping's
business.
"""

from __future__ import annotations

import hashlib
import mmap
import os
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file

from .commands import Piece
from .transport import Tensor, plan
from .wire import Refused


class WeightSet:
    """The parameters of one model, in name order."""

    def __init__(self, model: Any) -> None:
        self.parameters: dict[str, torch.Tensor] = dict(sorted(model.named_parameters()))

    @property
    def nbytes(self) -> int:
        """Bytes of all parameters."""
        return sum(int(p.numel() * p.element_size()) for p in self.parameters.values())

    def buckets(self, bucket_bytes: int) -> list[list[Piece]]:
        """The plan of these parameters."""
        return plan((Tensor(n, p.numel(), p.element_size()) for n, p in self.parameters.items()), bucket_bytes)

    def _slice(self, piece: Piece) -> torch.Tensor:
        # A view of the parameter's own memory: parameters are contiguous, flattening one copies nothing.
        return self.parameters[piece.name].detach().view(-1)[piece.start : piece.start + piece.count]

    def pack(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> int:
        """Write the pieces into a byte buffer; the number of bytes the bucket takes."""
        for piece in pieces:
            part = self._slice(piece)
            window(buffer, piece, part).copy_(part)
        return extent(self.parameters, pieces)

    def copy(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> int:
        """Copy the pieces out of a byte buffer into the parameters, in place; the number of parameter bytes."""
        size = 0
        for piece in pieces:
            part = self._slice(piece)
            part.copy_(window(buffer, piece, part))
            size += part.numel() * part.element_size()
        return size

    def save(self, path: Path) -> int:
        """Write all parameters to a safetensors file, which appears at `path` whole or not at all; their bytes."""
        part = path.with_name(f"{path.name}.part")
        save_file({name: p.detach().contiguous() for name, p in self.parameters.items()}, part)
        part.replace(path)
        return self.nbytes

    def read(self, path: Path, pieces: Sequence[Piece]) -> int:
        """Copy the pieces out of a safetensors file into the parameters, in place; the number of parameter bytes."""
        size = 0
        with safe_open(path, framework="pt") as file:
            for piece in pieces:
                part = self._slice(piece)
                part.copy_(file.get_tensor(piece.name).view(-1)[piece.start : piece.start + piece.count])
                size += part.numel() * part.element_size()
        return size

    def checksum(self) -> str:
        """Digest of names and bytes. Equal digests: bit-equal weights."""
        digest = hashlib.blake2b(digest_size=16)
        for name, parameter in self.parameters.items():
            digest.update(name.encode())
            # A copy: a storage once seen through numpy can never be resized again, and sleeping resizes it.
            copy = parameter.detach().to("cpu", copy=True)
            digest.update(copy.view(-1).view(torch.uint8).numpy())
        return digest.hexdigest()


def window(buffer: torch.Tensor, piece: Piece, part: torch.Tensor) -> torch.Tensor:
    """The place of a piece in the buffer, seen as elements of its parameter."""
    return buffer[piece.offset : piece.offset + part.numel() * part.element_size()].view(part.dtype)


def extent(parameters: dict[str, torch.Tensor], pieces: Sequence[Piece]) -> int:
    """Bytes from the start of a bucket to its last piece's end."""
    last = pieces[-1]
    return last.offset + last.count * int(parameters[last.name].element_size())


class Staging:
    """This process's view of the parent's staging buffer, mapped once and kept while it is the same file."""

    def __init__(self) -> None:
        self._file: tuple[int, int] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def at(self, path: str, size: int) -> torch.Tensor:
        """The buffer as bytes."""
        # The path is a file descriptor's number and comes again; the inode can't while it is mapped here.
        found = Path(path).stat()
        if (found.st_dev, found.st_ino) != self._file:
            file = os.open(path, os.O_RDWR)
            try:
                self._buffer = torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)
            finally:
                os.close(file)
            self._file = (found.st_dev, found.st_ino)
        return self._buffer


class Group:
    """Membership in the broadcast group; rank 0 sends. A group that failed is of no more use: join again.

    It is no `torch.distributed` default group: a process has one of those, and in vLLM's it is vLLM's.
    """

    def __init__(self) -> None:
        self._group: Any = None
        self._store: Any = None
        self._ahead: tuple[Sequence[Piece], torch.Tensor] | None = None  # the next bucket, packed

    def host(self) -> str:
        """Open the place where the next group meets, and become its rank 0; its address."""
        self.leave()
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        return f"127.0.0.1:{self._store.port}"

    def join(self, address: str, rank: int, world_size: int, timeout_s: float) -> None:
        """Meet the others, or raise after `timeout_s`."""
        timeout = timedelta(seconds=timeout_s)
        if rank > 0:
            self.leave()
            host, port = address.rsplit(":", 1)
            self._store = dist.TCPStore(host, int(port), is_master=False, timeout=timeout)
        self._group = dist.ProcessGroupGloo(self._store, rank, world_size, timeout)

    def leave(self) -> None:
        """Leave the group, if any."""
        self._group = None
        self._store = None
        self._ahead = None

    def send(self, weights: WeightSet, pieces: Sequence[Piece], following: Sequence[Piece] = ()) -> int:
        """Pack a bucket and broadcast it; its bytes. `following`: the next bucket, packed while this one is on its way.

        Buckets go in order. What a push that broke off had packed is thrown away by the first bucket of the next one.
        """
        ahead, self._ahead = self._ahead, None
        buffer = ahead[1] if ahead is not None and ahead[0] == pieces else self._packed(weights, pieces)
        sending = self._begin(buffer)
        if following:
            self._ahead = following, self._packed(weights, following)
        sending.wait()
        return len(buffer)

    def _packed(self, weights: WeightSet, pieces: Sequence[Piece]) -> torch.Tensor:
        buffer = self._buffer(weights, pieces)
        weights.pack(buffer, pieces)
        return buffer

    def receive(self, weights: WeightSet, pieces: Sequence[Piece]) -> int:
        """Take a bucket and copy it; its parameter bytes."""
        buffer = self._buffer(weights, pieces)
        self._begin(buffer).wait()
        return weights.copy(buffer, pieces)

    def _begin(self, buffer: torch.Tensor) -> Any:
        return self._group.broadcast([buffer], dist.BroadcastOptions())  # from rank 0, by default

    def _buffer(self, weights: WeightSet, pieces: Sequence[Piece]) -> torch.Tensor:
        if self._group is None:
            raise Refused("not in a broadcast group")
        return torch.empty(extent(weights.parameters, pieces), dtype=torch.uint8)
