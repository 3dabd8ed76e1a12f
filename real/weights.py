"""The children's half of a weight transfer: a model's parameters as named bytes.

Trainer and engine lay their parameters into buckets by the same plan, in name order; a bucket is a run of bytes that
the trainer packs and the engine copies in place, bit for bit. How the bytes travel is the group's or the mapping's
business.

On a GPU the bytes stay there: the staging buffer is the trainer's, and engines open it by CUDA IPC.
"""

from __future__ import annotations

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

from . import cuda
from .commands import Piece
from .devices import backend
from .digest import digest
from .transport import Tensor, plan
from .wire import Refused

MAGIC = b"rlsched: a CUDA IPC handle.\n"
"""How a staging file begins that holds the handle of a buffer instead of the bytes themselves."""


class WeightSet:
    """The parameters of one model, in name order."""

    def __init__(self, model: Any) -> None:
        self.parameters: dict[str, torch.Tensor] = dict(sorted(model.named_parameters()))
        #: Where they are, when they haven't been offloaded.
        self.device = next((p.device for p in self.parameters.values()), torch.device("cpu"))

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
        cuda.settle(self.device)
        return extent(self.parameters, pieces)

    def copy(self, buffer: torch.Tensor, pieces: Sequence[Piece]) -> int:
        """Copy the pieces out of a byte buffer into the parameters, in place; the number of parameter bytes."""
        size = 0
        for piece in pieces:
            part = self._slice(piece)
            part.copy_(window(buffer, piece, part))
            size += part.numel() * part.element_size()
        cuda.settle(self.device)
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
        cuda.settle(self.device)
        return size

    def checksum(self) -> str:
        """Digest of names and bytes. Equal digests: bit-equal weights."""
        return digest(self.parameters, cuda.on_gpu(self.device))


def window(buffer: torch.Tensor, piece: Piece, part: torch.Tensor) -> torch.Tensor:
    """The place of a piece in the buffer, seen as elements of its parameter."""
    return buffer[piece.offset : piece.offset + part.numel() * part.element_size()].view(part.dtype)


def extent(parameters: dict[str, torch.Tensor], pieces: Sequence[Piece]) -> int:
    """Bytes from the start of a bucket to its last piece's end."""
    last = pieces[-1]
    return last.offset + last.count * int(parameters[last.name].element_size())


class Staging:
    """This process's view of the staging buffer behind the parent's file, opened once and kept while it is the same.

    On a CPU the file is the buffer, mapped. `device` is a trainer's: on a GPU it allocates the buffer there and leaves
    its CUDA IPC handle in the file, whence engines open it. Either way one buffer serves all buckets, stop and wait.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._found: tuple[int, int, bytes] | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def at(self, path: str, size: int) -> torch.Tensor:
        """The buffer as bytes."""
        file = os.open(path, os.O_RDWR)
        try:
            # The path is a file descriptor's number and comes again; the inode can't while it is mapped here.
            status = os.fstat(file)
            found = (status.st_dev, status.st_ino, read_handle(file))
            if found != self._found:
                self._buffer = self._open(file, size, found[2])
                self._found = (*found[:2], read_handle(file))
        finally:
            os.close(file)
        return self._buffer

    def _open(self, file: int, size: int, handle: bytes) -> torch.Tensor:
        self._buffer = torch.empty(0, dtype=torch.uint8)  # the one before goes first
        if cuda.on_gpu(self._device):
            cuda.release()
            buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
            write_handle(file, cuda.exported(buffer))
            return buffer
        if handle:
            return cuda.opened(handle)
        return torch.frombuffer(mmap.mmap(file, size), dtype=torch.uint8)

    @property
    def handle(self) -> bytes:
        """Of the buffer; empty where it is memory of the host."""
        return self._found[2] if self._found else b""


def write_handle(file: int, handle: bytes) -> None:
    """Leave a handle in a staging file. Raises ValueError if it doesn't fit there."""
    note = MAGIC + len(handle).to_bytes(4, "little") + handle
    room = os.fstat(file).st_size
    if len(note) > room:
        raise ValueError(f"a bucket of {room} bytes is too small for a CUDA IPC handle of {len(note)}")
    os.pwrite(file, note, 0)


def read_handle(file: int) -> bytes:
    """The handle in a staging file; empty if it holds none."""
    head = os.pread(file, len(MAGIC) + 4, 0)
    if not head.startswith(MAGIC):
        return b""
    return os.pread(file, int.from_bytes(head[len(MAGIC) :], "little"), len(head))


class Group:
    """Membership in the broadcast group; rank 0 sends. A group that failed is of no more use: join again.

    It is no `torch.distributed` default group: a process has one of those, and in vLLM's it is vLLM's. Members that
    have a GPU each use NCCL, all others gloo, through host memory; which it is, they find out when they meet.
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self._device = device
        self._staged: torch.device | str = "cpu"  # where buckets wait for the broadcast
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
        self._store.set(f"device {rank}", cuda.identity(self._device))
        self._staged = "cpu"
        if cuda.on_gpu(self._device):  # members without a GPU know already
            self._store.set_timeout(timeout)
            members = [self._store.get(f"device {other}").decode() for other in range(world_size)]
            if backend(members) == "nccl":
                self._staged = self._device
                self._group = cuda.nccl(self._store, rank, world_size, timeout)
                return
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
        self._end(sending)
        return len(buffer)

    def _packed(self, weights: WeightSet, pieces: Sequence[Piece]) -> torch.Tensor:
        buffer = self._buffer(weights, pieces)
        weights.pack(buffer, pieces)
        return buffer

    def receive(self, weights: WeightSet, pieces: Sequence[Piece]) -> int:
        """Take a bucket and copy it; its parameter bytes."""
        buffer = self._buffer(weights, pieces)
        self._end(self._begin(buffer))
        return weights.copy(buffer, pieces)

    def _begin(self, buffer: torch.Tensor) -> Any:
        return self._group.broadcast([buffer], dist.BroadcastOptions())  # from rank 0, by default

    def _end(self, sending: Any) -> None:
        sending.wait()
        cuda.settle(self._staged)

    def _buffer(self, weights: WeightSet, pieces: Sequence[Piece]) -> torch.Tensor:
        if self._group is None:
            raise Refused("not in a broadcast group")
        return torch.empty(extent(weights.parameters, pieces), dtype=torch.uint8, device=self._staged)
