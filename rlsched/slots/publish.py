"""Publication: when new weights go out and what becomes of running requests."""

from ..commands import Transport
from ..decisions import Install
from ..errors import InputError
from ..ledger import Ledger
from ..shape import Fate, Promises, Shape
from ..slot import Aloof


class EveryVersion(Aloof, frozen=True):
    """Install each version on all serving engines as soon as it is trained.

    An engine that comes up, or was lent and comes back, is behind and gets the trained version, too.
    """

    transport: Transport = "broadcast"
    """``broadcast``: NCCL on GPUs, gloo on CPUs; ``ipc``: CUDA IPC, or shared memory on CPUs; ``disk``: a
    checkpoint that the trainer writes once and every engine reads (AReaL: ``WeightUpdateMeta.type`` ``disk``)."""
    bucket_mb: int = 1024
    """Bucket size in MiB (AReaL: ``weight_chunked_mem_mb``, 1024; verl: ``update_weights_bucket_megabytes``)."""
    fate: Fate = "resume"
    """Fate of running requests: ``drain``, ``resume``, ``restart``, ``retract`` (vLLM: ``pause_generation`` with
    ``mode="keep", clear_cache=True``; SGLang: ``retract``) or ``keep`` (vLLM: ``mode="keep", clear_cache=False``;
    SGLang: ``in_place``)."""
    flush: bool = True
    """Forget cached KV after an install. Under ``keep`` nothing is flushed: it promises that no request stands on
    KV older than itself."""
    rolling: bool = False
    """One engine after the other, while the others generate; the version is published with the last."""

    def __post_init__(self) -> None:
        if self.bucket_mb < 1:
            raise InputError(f"publish.bucket_mb is {self.bucket_mb}: it must be at least 1")
        if self.fate == "retract" and not self.flush:
            raise InputError("publish.fate is retract, which flushes: leave publish.flush true, or choose keep")

    def decide(self, state: None, ledger: Ledger) -> Install | None:
        behind = ledger.behind()
        if not behind:
            return None
        asleep = [e for e in behind if "weights" not in ledger.engines[e].awake]  # nothing goes on there meanwhile
        engines = (asleep or behind[:1]) if self.rolling else behind
        return Install(ledger.x, engines, self.transport, self.bucket_mb * 2**20, self.fate, self.flush)

    def promises(self, shape: Shape) -> Promises:
        return Promises(partial=self.fate, flush=self.flush)
