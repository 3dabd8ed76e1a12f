"""SGLang as an engine: a child process that starts a real SGLang server and drives it over HTTP.

`hosted` serves the commands; `sglang_driver` has the traffic with the server. Where SGLang differs:

* An abort lets a running request do one more step, whose token counts. Inside a pause nothing steps: there all running
  requests go back to SGLang's queue first (`retract`), and those not aborted compute their KV anew when it goes on.
* A complete update goes from the landing into the server (see `sglang_updates`), and is compared with what is there
  then. The prefix cache is off, so that no stale prefix is left behind. KV that live requests hold stays old until they
  are flushed with `recompute`, as in the embedded engine.
* Counting also asks the scheduler's loop to come by, so that one that has stopped is named. A control that the server
  has not answered in a minute is the engine's end.
* Submitted in a pause, a request waits in this process.
* On a CPU SGLang's sleep frees nothing. It is asked for all the same, so that the order of calls is the one on a GPU,
  and a level 2 sleep still wants a complete update; `Capabilities.sleep_frees` is empty, and `Slept` is measured.
* SGLang's seed for each request needs kernels that a CPU build without `sgl_kernel` lacks. `Reset` seeds the generator
  that its sampler draws from, as in the embedded engine: what a request draws depends on its batch mates.
* Versions are this child's own, from the updates that it made. SGLang's label of each token is compared with them, and
  where they differ a line on stderr says so.

Run as `python -m rlsched.real.engines.sglang --fd N --parent PID` by the interpreter of SGLang's own environment.
"""

from __future__ import annotations

from typing import ClassVar

from .. import commands
from . import Capabilities
from .hosted import HostedEngine, main
from .sglang_driver import SglangDriver
from .sglang_landing import SglangLanding


class SglangEngine(HostedEngine):
    """A `HostedEngine` on an SGLang server."""

    #: Whether requests share the KV of equal prefixes; see `sglang_sharing`.
    sharing: ClassVar[bool] = False
    _driver: SglangDriver

    def _open(self) -> tuple[SglangLanding, SglangDriver]:
        landing = SglangLanding(self._config.model)
        return landing, SglangDriver(self._config, landing, self._tell, self.sharing)

    @property
    def _max_input_tokens(self) -> int:
        return int(self._driver.info["max_req_input_len"])

    def _fits(self, command: commands.Submit) -> bool:
        return super()._fits(command) and len(command.tokens) < self._max_input_tokens

    async def _alive(self) -> None:
        await self._driver.alive()

    async def _reseed(self, seed: int) -> None:
        await self._driver.reseed(seed)

    def capabilities(self) -> Capabilities:
        """What it can do here."""
        info = self._driver.info
        # SGLang cuts an output short so that one position stays free; five less than all is its bound of the input.
        positions = self._max_input_tokens + 4
        # A request that it reckons to need more, with a page for the input's end and one to spare, waits for ever.
        most = min(positions, int(info["max_total_num_tokens"]) - 2 * int(info["page_size"]) - 2)
        return Capabilities(
            engine="sglang",
            version=info["version"],
            device=info["device"],
            max_request_tokens=most,
            kv_tokens=info["max_total_num_tokens"],
            page_size=info["page_size"],
            max_requests=info["max_running_requests"],
            max_batch_tokens=info["chunked_prefill_size"],
            pause_modes=("keep", "retract", "abort"),
            flush_live=True,
            sleep_levels=self._landing.levels,
            sleep_frees=("weights", "kv") if info["enable_memory_saver"] else (),
            wake_tags=("weights", "kv"),
            transports=("shared", "broadcast", "disk"),
            in_place_update=True,
            abort_partials=True,
            step_trace=True,
        )


if __name__ == "__main__":
    main(SglangEngine)
