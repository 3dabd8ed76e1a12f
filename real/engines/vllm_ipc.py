"""vLLM with its own weight transfer over CUDA IPC, fed from our buckets. For GPUs only; not run on one yet.

The trainer's staging buffer is what vLLM calls a packed buffer: parameters one behind the other, and an IPC handle. It
lands in the Hugging Face model as always, so that digests compare; but what vLLM generates with, it has taken from the
trainer's memory by itself, with `init_weight_transfer_engine`, `start_weight_update`, `update_weights` and
`finish_weight_update` of its `ipc` backend.

Run as `PYTHON -m rlsched.real.engines.vllm_ipc --fd N --parent PID`.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory

from .. import answers, commands, cuda
from .entry import main, run
from .packed import packed
from .residence import Residence
from .vllm import VllmEngine
from .vllm_batching import VllmBatcher


def attach(worker: Any) -> None:
    """Give a worker the `ipc` backend, as its own configuration would have."""
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="ipc"), worker.vllm_config, worker.device, worker.model_runner.get_model()
    )


class IpcVllmEngine(VllmEngine):
    """A `VllmEngine` that takes buckets twice: into the landing model, and by vLLM's transfer."""

    _open_session = False

    def _open(self) -> tuple[VllmBatcher, Residence]:
        batcher, residence = super()._open()
        self._core = batcher._core
        self._core.collective_rpc(attach)
        self._core.collective_rpc("init_weight_transfer_engine", kwargs={"init_info": {"packed": True}})
        return batcher, residence

    def _execute(self, command: commands.Command) -> answers.Result:
        result = super()._execute(command)
        match command:
            case commands.BeginUpdate():
                self._core.collective_rpc("start_weight_update")
                self._open_session = True
            case commands.CopyBucket(pieces=pieces):
                device = cuda.identity(torch.device("cuda", torch.cuda.current_device())).removeprefix("cuda:")
                told = packed(pieces, self._weights.parameters)
                told["ipc_handles"] = {device: cuda.arguments(self._staging.handle)}
                self._core.collective_rpc("update_weights", kwargs={"update_info": told})
        return result

    def _adopt(self) -> None:
        if not self._open_session:
            super()._adopt()
            return
        self._core.collective_rpc("finish_weight_update")
        self._open_session = False
        self._core.set_weight_version(str(self._residence.version))
        self._batcher.renew()


if __name__ == "__main__":
    run(lambda: main(IpcVllmEngine))
