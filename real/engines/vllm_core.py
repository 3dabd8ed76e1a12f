"""vLLM's scheduler, in the process of its engine core, telling the engine child what it does (see `link`).

It goes in by vLLM's `scheduler_cls` and decides nothing that vLLM's own does not, but for one thing: once vLLM has
refused to reset the prefix cache, because requests stand on it, what begins later shares no KV computed until then.

* Before a step's tokens go out it is held to its declared minimum; then a record goes out, ahead of them.
* The scheduler is paused by the core between two steps. What stands then, and who is still there, goes out ahead of
  the core's answer.
* The core dies with its parent; vLLM's own would outlive it.
"""

from __future__ import annotations

import os
import socket
import time
from typing import Any

import msgspec
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from ..answers import Step
from ..pacing import Pacer
from .family import die_with_parent
from .link import LINK, Record, Stepped, Stood, Taken, Terms, Totals, frame
from .vllm_arguments import SERVED


class CoreScheduler(Scheduler):  # type: ignore[misc]
    """vLLM's scheduler, paced, with a line to the engine child."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        die_with_parent()
        super().__init__(*args, **kwargs)
        terms = msgspec.json.decode(os.environ[LINK], type=Terms)
        self._pace = terms.pace
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peer.connect(f"\0{terms.address}")
        self._pacer = Pacer()
        self._planned: tuple[int, int, int] | None = None  # what the step under way computes
        self._began = 0
        self._stepped = 0  # when the last step ended
        self._salt = 0

    def _tell(self, record: Record) -> None:
        self._peer.sendall(frame(record))

    # ------------------------------------------------------------ steps

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Plan the next step."""
        # Continuous work is timed from the end of the step before, so that nothing between two steps is lost.
        began = self._stepped if self._pacer.chained else time.monotonic_ns()
        planned = super().schedule(*args, **kwargs)
        if planned.total_num_scheduled_tokens:
            self._began = began
            self._pacer.start()
            self._planned = work(self.requests, planned)
        return planned

    def update_from_output(self, planned: SchedulerOutput, output: Any) -> Any:
        """End a step: hold it, take its tokens in, and tell."""
        if self._planned is None:
            return super().update_from_output(planned, output)
        worked = time.monotonic_ns()
        if self._pace is not None:
            self._pacer.hold(self._pace.of(*self._planned))
        self._stepped = time.monotonic_ns()
        step = Step(self._stepped - self._began, worked - self._began, *self._planned)
        self._planned = None
        # Who ends with this step leaves the scheduler.
        requests = [self.requests[id] for id in planned.num_scheduled_tokens if id in self.requests]
        result = super().update_from_output(planned, output)
        pacer = self._pacer
        totals = Totals(pacer.held, pacer.declared_ns, pacer.overruns, pacer.overrun_ns)
        self._tell(Stepped(step, {rid(r): r.num_output_tokens for r in requests}, totals))
        if not self.has_unfinished_requests():
            self._pacer.rest()
        return result

    # ------------------------------------------------------------ requests, pauses, and KV

    def add_request(self, request: Request) -> None:
        """Queue a request, and tell."""
        if self._salt:
            self._set_apart(request)
        super().add_request(request)
        self._tell(Taken(rid(request)))

    def set_pause_state(self, pause_state: PauseState) -> None:
        """Pause or go on."""
        super().set_pause_state(pause_state)
        self._pacer.rest()
        if pause_state != PauseState.UNPAUSED:
            self._stood()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Forget cached KV, if vLLM can; else what begins later shares none of it."""
        done: bool = super().reset_prefix_cache(*args, **kwargs)
        if not done:
            self._salt += 1
            for request in self.requests.values():
                if request.status != RequestStatus.RUNNING:
                    self._set_apart(request)
        if self.pause_state != PauseState.UNPAUSED:
            self._stood()
        return done

    def _set_apart(self, request: Request) -> None:
        # A salt goes into the hash of every page.
        request.cache_salt = str(self._salt)
        request.block_hashes.clear()
        request.update_block_hashes()

    def _stood(self) -> None:
        self._tell(Stood([rid(r) for r in self.running], [rid(r) for r in self.requests.values()]))


def rid(request: Request) -> str:
    """The id under which the child sent a request; vLLM adds to it in front and behind."""
    return str(request.request_id).removeprefix(SERVED).partition("-")[0]


def work(requests: dict[str, Request], planned: SchedulerOutput) -> tuple[int, int, int]:
    """What a step computes: requests that decode, tokens of context that they read, tokens of all other requests."""
    decoding = kv_tokens = prompt_tokens = 0
    for id, size in planned.num_scheduled_tokens.items():
        request = requests[id]
        # A request decodes when its context, all but the newest token, is in the cache already. The scheduler
        # has counted this step's tokens as computed by now.
        if size == 1 and request.num_output_tokens:
            decoding += 1
            kv_tokens += request.num_computed_tokens - size
        else:
            prompt_tokens += size
    return decoding, kv_tokens, prompt_tokens
