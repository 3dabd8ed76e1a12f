"""vLLM with its engine core in a process of its own, as an engine: what `vllm_async` and `vllm_http` have in common.

`hosted` serves the commands; `vllm_driver` has the traffic with vLLM.

* Pauses are vLLM's own, in all modes. Submitted in one, a request waits in vLLM's queue.
* An abort is sent inside a pause: it stops the others for a moment (some 20 ms, most of it vLLM's own), and costs none
  a token.
* A complete update goes from the landing into the worker, which reads back what it computes with. The prefix cache is
  reset then; where requests stand on it, theirs is shared with nobody from then on.
* On a CPU vLLM's sleep frees nothing. It is asked for all the same, so that the order of calls is the one on a GPU,
  and a level 2 sleep still wants a complete update; `Capabilities.sleep_frees` is empty, and `Slept` is measured.
* Versions are this child's own, from the updates that it made. vLLM's label of each token is passed on in `Ended`,
  and where the two differ a line on stderr says so.
"""

from __future__ import annotations

from typing import ClassVar

from . import Capabilities
from .hosted import HostedEngine
from .vllm_arguments import pages
from .vllm_driver import Port, VllmDriver
from .vllm_landing import VllmLanding


class VllmHosted(HostedEngine):
    """A `HostedEngine` on vLLM."""

    kind: ClassVar[str]
    """Its name as an engine."""
    _driver: VllmDriver

    def _port_to_vllm(self) -> Port:
        """A way to a vLLM that is not started."""
        raise NotImplementedError

    def _open(self) -> tuple[VllmLanding, VllmDriver]:
        landing = VllmLanding(self._config.model)
        return landing, VllmDriver(self._config, landing, self._port_to_vllm(), self._tell)

    async def _reseed(self, seed: int) -> None:
        await self._driver.seed(seed)

    def capabilities(self) -> Capabilities:
        """What it can do here."""
        kv = pages(self._config)
        return Capabilities(
            engine=self.kind,
            version=self._driver.about["version"],
            device=self._driver.about["device"],
            max_request_tokens=min(kv.tokens, self._config.model.max_positions),
            kv_tokens=kv.tokens,
            page_size=kv.size,
            max_requests=self._config.max_requests,
            max_batch_tokens=self._config.max_batch_tokens,
            pause_modes=("keep", "retract", "abort", "wait"),
            flush_live=True,
            sleep_levels=self._landing.levels,
            sleep_frees=() if self._config.device == "cpu" else ("weights", "kv"),
            wake_tags=("weights", "kv"),
            transports=("shared", "broadcast", "disk"),
            in_place_update=True,
            abort_partials=True,
            step_trace=True,
        )
