"""vLLM without rlsched's guards (see `careless`): after an update, prompts go on to share KV of older weights.

For canary tests only. Run as `PYTHON -m rlsched.real.engines.vllm_bare --fd N --parent PID`.
"""

from __future__ import annotations

from .careless import Careless, CarelessResidence
from .entry import main, run
from .residence import Residence
from .vllm import VllmEngine, VllmMemory
from .vllm_batching import VllmBatcher


class BareVllmEngine(Careless, VllmEngine):
    """It flushes when it is told to, and not otherwise."""

    renewing = False

    def _open(self) -> tuple[VllmBatcher, Residence]:
        batcher, _ = super()._open()
        return batcher, CarelessResidence(self._weights, VllmMemory(batcher), (1, 2))


if __name__ == "__main__":
    run(lambda: main(BareVllmEngine))
