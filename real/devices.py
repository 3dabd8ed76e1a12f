"""What devices are called, and what follows from it: which transports there are, and what labels may say.

Light: importing it loads no torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Backend = Literal["gloo", "nccl"]


def kind(device: str) -> str:
    """The type of a torch device by name: `cpu` or `cuda`."""
    return device.partition(":")[0]


def full(device: str) -> str:
    """The name with its index: `cuda` is the first GPU."""
    return f"{device}:0" if device == "cuda" else device


def nth(device: str, engine: int) -> str:
    """Where engine number `engine` computes: `cuda:1` gives each the next GPU, `cuda` and `cpu` all the same one."""
    named, colon, index = device.partition(":")
    return f"{named}:{int(index) + engine}" if colon and named == "cuda" else device


def backend(members: Sequence[str]) -> Backend:
    """What carries a broadcast among processes on these devices, one entry a process.

    NCCL needs a GPU of its own for each process; in any other case buckets go through host memory, over gloo.
    """
    distinct = len(set(members)) == len(members)
    return "nccl" if distinct and all(kind(m) == "cuda" for m in members) else "gloo"


def labels(engine: str, trainer: str, engines: int, places: int) -> dict[str, str]:
    """A manifest's labels of devices and transports.

    `engines` children compute on devices from `engine` on, the trainer on `trainer`; the policy lays out `places`
    devices, which may be more than there are.
    """
    members = [full(trainer), *(full(nth(engine, e)) for e in range(engines))]
    cuda = kind(engine) == kind(trainer) == "cuda"
    there = "GPU" if kind(engine) == "cuda" else "cores"
    if cuda and places > len(set(members)):
        there = "one GPU, shared" if len(set(members)) == 1 else "GPUs, shared"
    return {"device": there, "ipc": "CUDA IPC" if cuda else "shared memory", "broadcast": backend(members)}
