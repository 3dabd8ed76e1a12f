"""What a GPU needs and a CPU doesn't: waiting for kernels, the driver's count of memory, CUDA IPC, NCCL.

On a CPU `settle` and `release` do nothing. Everything else here is called with a GPU only, and has not been run on one
yet: `rlsched gpu` is the check that will.
"""

from __future__ import annotations

import os
import pickle
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import reductions


def on_gpu(device: torch.device | str) -> bool:
    """Whether it is a GPU."""
    return bool(torch.device(device).type == "cuda")


def choose(device: str) -> None:
    """Make `device` this process's own, before anything is allocated."""
    if on_gpu(device):
        torch.cuda.set_device(torch.device(device).index or 0)


def settle(device: torch.device | str) -> None:
    """Wait until everything issued to the device is done; on a CPU it always is."""
    if on_gpu(device):
        torch.cuda.synchronize(device)


def release() -> None:
    """Give memory that torch keeps for reuse back to the driver, and what no other process has open any more."""
    if torch.cuda.is_initialized():
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()


def used(device: torch.device | str) -> int:
    """Bytes of the GPU in use, by the driver's count: of all processes, not of this one alone."""
    free, total = torch.cuda.mem_get_info(device)
    return int(total - free)


def identity(device: torch.device | str) -> str:
    """A name of the device that is the same in every process of this machine."""
    return f"cuda:{torch.cuda.get_device_properties(device).uuid}" if on_gpu(device) else "cpu"


def exported(buffer: torch.Tensor) -> bytes:
    """A CUDA IPC handle of the buffer, for other processes. The buffer must live as long as any has it open."""
    _, arguments = reductions.reduce_tensor(buffer)
    return pickle.dumps(arguments)


def arguments(handle: bytes) -> tuple[Any, ...]:
    """What torch's `rebuild_cuda_tensor` takes. A handle comes from this run's own trainer and from nobody else."""
    found: tuple[Any, ...] = pickle.loads(handle)
    return found


def opened(handle: bytes) -> torch.Tensor:
    """Another process's buffer: the same memory, not a copy."""
    buffer: torch.Tensor = reductions.rebuild_cuda_tensor(*arguments(handle))
    return buffer


def nccl(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A NCCL group of processes that have a GPU each. For two GPUs and more."""
    # A wait must end when a member has died, not only when the kernels do.
    os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout
    return dist.ProcessGroupNCCL(store, rank, size, options)
