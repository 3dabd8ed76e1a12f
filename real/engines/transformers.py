"""The embedded engine, as a child process: transformers' continuous batching on one model, on CPU or GPU.

transformers' batching loop is the thread that carries out commands, between two steps (see `batching`). The model that
an update is copied into is the one that generates, so that nothing is left to do when it is whole.

Run as `python -m rlsched.real.engines.transformers --fd N --parent PID`.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import transformers

from .. import cuda
from ..model import build
from . import Capabilities, entry
from .batching import Batcher
from .entry import run
from .residence import OwnMemory, Residence
from .server import EngineServer


class TransformersEngine(EngineServer):
    """An `EngineServer` on transformers' continuous batching."""

    #: What `bare` takes away.
    residence: ClassVar[type[Residence]] = Residence
    sharing: ClassVar[bool] = False
    _batcher: Batcher

    def _landing(self) -> Any:
        cuda.choose(self._config.device)
        return build(self._config.model, self._config.device)

    def _open(self) -> tuple[Batcher, Residence]:
        batcher = Batcher(self._model, self._config, self._control, self._begin_step, self.sharing)
        # Level 1 keeps the weights in host memory, which is where a CPU engine has them.
        parks = cuda.on_gpu(self._config.device)
        return batcher, self.residence(self._weights, OwnMemory(self._weights, batcher.cache), (1, 2), parks)

    def _end_step(self) -> None:
        cuda.settle(self._config.device)  # a step is over when its kernels are
        super()._end_step()

    def serve(self) -> Exception | None:
        """Run transformers' loop until closed; what killed it, if something did."""
        self._batcher.start()
        while self._batcher.running and not self._closing.wait(0.05):
            pass
        if not self._batcher.running:
            return self._batcher.fatal or RuntimeError("the batching loop ended by itself")
        self._batcher.stop()
        return None

    def capabilities(self) -> Capabilities:
        """What it can do here."""
        return Capabilities(
            engine="transformers",
            version=transformers.__version__,
            device=torch.device(self._config.device).type,
            max_request_tokens=self._max_request_tokens,
            kv_tokens=self._batcher.kv_tokens,
            page_size=self._config.page_size,
            max_requests=self._config.max_requests,
            max_batch_tokens=self._config.max_batch_tokens,
            pause_modes=self.pause_modes,
            flush_live=True,
            sleep_levels=self._residence.levels,
            sleep_frees=("weights", "kv"),
            wake_tags=("weights", "kv"),
            transports=("shared", "broadcast", "disk"),
            in_place_update=True,
            abort_partials=True,
            step_trace=True,
        )


def main(kind: type[TransformersEngine] = TransformersEngine) -> int:
    """Serve one parent until it closes the socket; the exit code."""
    return entry.main(kind)


if __name__ == "__main__":
    run(main)
