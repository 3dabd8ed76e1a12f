"""vLLM, as a child process of vLLM's own interpreter: its synchronous `LLMEngine`, stepped by our loop.

`LLMEngine.step()` and not `AsyncLLM`: with the engine core, scheduler and worker in this one process and thread
(`VLLM_ENABLE_V1_MULTIPROCESSING=0`, executor `uni`, no asynchronous scheduling), nothing is in flight between two
steps. So an abort has exactly the tokens that were computed, an update can't meet a forward pass, each step can be
held to its minimum, and a killed child leaves no engine core behind.

The bytes of an update land in a Hugging Face model of the same weights that never runs: vLLM fuses and repacks its
own parameters, which have other names. What is summed is what landed; when it is whole, vLLM reloads from it, and no
KV of older weights is shared from then on.

Run as `PYTHON -m rlsched.real.engines.vllm --fd N --parent PID`, with the environment of `installs.ENGINES`.
"""

from __future__ import annotations

from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import vllm
from vllm.platforms import current_platform

from ..cuda import choose
from ..devices import kind
from ..memory import trim
from ..model import build
from . import Capabilities
from .entry import main, run
from .residence import PARTS, Residence
from .server import EngineServer
from .vllm_batching import VllmBatcher


class VllmMemory:
    """Sleep as vLLM does it: on a GPU it frees; on a CPU nothing is freed, and only the scheduler stands still."""

    def __init__(self, batcher: VllmBatcher) -> None:
        self._batcher = batcher
        self._dropped: Sequence[str] = ()

    def drop(self, parts: Sequence[str]) -> None:
        """Sleep at the level that takes these parts."""
        self._dropped = parts
        self._batcher.sleep(len(parts))
        trim()

    def take(self, parts: Sequence[str]) -> None:
        """Wake these parts. On a CPU the weights, too, sleep at level 1, by vLLM's count: all wakes with the KV."""
        level1 = current_platform.is_cpu() and "weights" not in self._dropped
        self._batcher.wake(PARTS if level1 else parts)

    def forget_kv(self) -> None:
        """Forget all cached KV."""
        self._batcher.forget()


class VllmEngine(EngineServer):
    """An `EngineServer` on vLLM."""

    #: Whether an update ends the sharing of KV computed before it; `vllm_bare` takes it away.
    renewing: ClassVar[bool] = True
    _batcher: VllmBatcher

    def _landing(self) -> Any:
        choose(self._config.device)
        return build(self._config.model, self._config.device)

    def _open(self) -> tuple[VllmBatcher, Residence]:
        if kind(self._config.device) != current_platform.device_type:
            raise ValueError(f"this vLLM computes on {current_platform.device_type}, not on {self._config.device}")
        with TemporaryDirectory(prefix="rlsched-") as checkpoint:
            self._model.save_pretrained(checkpoint)
            batcher = VllmBatcher(self._config, checkpoint, self._begin_step)
        # On a GPU level 1 takes the weights off the device, and no update may land in them there.
        parks = not current_platform.is_cpu()
        return batcher, Residence(self._weights, VllmMemory(batcher), (1, 2), parks=parks)

    def _adopt(self) -> None:
        self._batcher.load(self._weights.parameters, self._residence.version)
        if self.renewing:
            self._batcher.renew()

    def serve(self) -> Exception | None:
        """Step until closed; what a step raised."""
        try:
            while not self._closing.is_set():
                self._control()
                if self._requests and not self._closing.is_set():
                    self._batcher.step()
        except Exception as error:
            return error
        return None

    def capabilities(self) -> Capabilities:
        """What it can do here."""
        cpu = current_platform.is_cpu()
        return Capabilities(
            engine="vllm",
            version=vllm.__version__,
            device=current_platform.device_type,
            max_request_tokens=self._max_request_tokens,
            kv_tokens=self._batcher.kv_tokens,
            page_size=self._batcher.page_size,
            max_requests=self._config.max_requests,
            max_batch_tokens=self._config.max_batch_tokens,
            pause_modes=self.pause_modes,
            flush_live=True,
            sleep_levels=self._residence.levels,
            sleep_frees=() if cpu else ("weights", "kv"),
            wake_tags=("weights", "kv"),
            transports=("shared", "broadcast", "disk"),
            in_place_update=True,
            abort_partials=True,
            step_trace=True,
        )


if __name__ == "__main__":
    run(lambda: main(VllmEngine))
