"""Publication: when new weights go out and what becomes of running requests."""

from typing import Literal

from ..commands import Transport
from ..decisions import Install
from ..errors import InputError
from ..ledger import Ledger
from ..shape import Promises, Shape
from ..slot import Slot


class EveryVersion(Slot, frozen=True):
    """Install each version on all serving engines as soon as it is trained."""

    transport: Transport = "broadcast"
    """``broadcast``: NCCL on GPUs, gloo on CPUs; ``ipc``: CUDA IPC, or shared memory on CPUs."""
    bucket_mb: int = 1024
    """Bucket size in MiB (AReaL: ``weight_chunked_mem_mb``, 1024; verl: ``update_weights_bucket_megabytes``)."""
    fate: Literal["drain", "resume", "restart"] = "resume"
    """Fate of running requests."""
    flush: bool = True
    """Forget cached KV after an install."""

    def __post_init__(self) -> None:
        if self.bucket_mb < 1:
            raise InputError(f"publish.bucket_mb is {self.bucket_mb}: it must be at least 1")

    def decide(self, state: None, ledger: Ledger) -> Install | None:
        if ledger.x == ledger.v:
            return None
        return Install(ledger.x, ledger.serving(), self.transport, self.bucket_mb * 2**20, self.fate, self.flush)

    def promises(self, shape: Shape) -> Promises:
        return Promises(partial=self.fate, flush=self.flush)
