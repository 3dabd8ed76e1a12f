"""The seam into transformers' continuous batching: requests in, ended requests out, and a place to stand between steps.

transformers runs its batching loop in a thread of its own. We enter that thread at one point, before a batch is
prepared, and do everything there: between two steps nothing is half done, so that an abort can read a request's final
tokens, a weight update can't meet a forward pass, and no lock is needed. (The library's own `cancel_request` delivers
nothing, and cancelling inside its `pause()` lets one more step run under the new weights.)

Used of transformers, unchanged from 5.18 to 5.24: the manager's start/stop and output router; of its batch processor
`prepare_next_batch`; of the scheduler `active_requests`, `waiting_requests`, `add_waiting_request`, `finish_request`,
`set_request_cancellation` and `clear_cancelled_requests`; and the cache.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Any

from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.requests import RequestState

from ..config import EngineConfig
from .server import Output, Work


class Batcher:
    """A model under continuous batching.

    `control` is called between steps, `begun` with what the next step will compute; both in the loop's thread, to which
    all methods but `start` and `stop` belong.
    """

    def __init__(
        self,
        model: Any,
        config: EngineConfig,
        control: Callable[[], None],
        begun: Callable[[Work], None],
        sharing: bool = False,
    ) -> None:
        greedy = config.temperature == 0
        generation = GenerationConfig(
            do_sample=not greedy,
            temperature=None if greedy else config.temperature,
            top_k=None if greedy else 0,  # the library's default is 50
            eos_token_id=-1,  # each request brings its own
            pad_token_id=0,
        )
        batching = ContinuousBatchingConfig(
            page_size=config.page_size,
            num_blocks=config.kv_blocks,
            max_batch_tokens=config.max_batch_tokens,
            max_requests_per_batch=config.max_requests,
            # Shared blocks hand KV of older weights to a prompt that comes again, unless they are flushed.
            allow_block_sharing=sharing,
            use_async_batching=False,  # a batch in flight at the control point would be half done
            auto_switch_to_flash=False,  # its kernels come from a hub, and float32 has none
            use_cuda_graph=False,  # a captured graph has the addresses of memory that a sleep gives back
            return_logprobs=True,
            safety_margin=0.0,
            seed=config.seed,
        )
        self._eos = config.eos
        self._control = control
        self._begun = begun
        self._manager = model.init_continuous_batching(
            generation_config=generation, continuous_batching_config=batching
        )
        # Creates the KV cache now, in this thread; the loop will find it and take it.
        self._manager.warmup()
        self._processor = self._manager.batch_processor
        self._scheduler = self._processor.scheduler
        self.cache = self._processor.cache
        self._prepare = self._processor.prepare_next_batch
        self._processor.prepare_next_batch = self._enter

    def _enter(self) -> bool:
        self._control()
        ready = bool(self._prepare())
        if ready:
            self._begun(self._work())
        return ready

    def start(self) -> None:
        """Start the loop; it begins in the control point."""
        self._manager.start()

    def stop(self) -> None:
        """End the loop and wait for it; the control point must not wait any more."""
        self._manager.stop(block=True, hard_stop=True)

    @property
    def running(self) -> bool:
        """Whether the loop's thread lives."""
        return bool(self._manager.is_running())

    @property
    def fatal(self) -> Exception | None:
        """What killed the loop."""
        error: Exception | None = self._manager.background_thread_status.fatal_error
        return error

    @property
    def kv_tokens(self) -> int:
        """Tokens of KV."""
        return int(self.cache.num_blocks * self._manager.continuous_batching_config.page_size)

    # ------------------------------------------------------------ requests

    def add(self, rollout: str, tokens: list[int], max_new_tokens: int, forced: bool) -> None:
        """Queue a request."""
        state = RequestState(
            request_id=rollout,
            initial_tokens=list(tokens),
            max_new_tokens=max_new_tokens,
            eos_token_id=None if forced else self._eos,
        )
        self._scheduler.add_waiting_request(state)

    @property
    def live(self) -> dict[str, Any]:
        """States of all requests, those in the batch first, then the queue."""
        return {**self._scheduler.active_requests, **self._scheduler.waiting_requests}

    def progress(self) -> dict[str, int]:
        """Tokens generated by each live request."""
        return {rollout: len(_output(state).tokens) for rollout, state in self.live.items()}

    def cancel(self, rollout: str) -> Output:
        """Drop a live request and its KV; what it had generated."""
        output = _output(self.live[rollout])
        self._scheduler.set_request_cancellation(rollout)
        self._scheduler.clear_cancelled_requests()
        # A preemption bars new requests until one finishes; a cancelled one never does.
        self._scheduler.block_new_requests = False
        return output

    def ended(self) -> list[Output]:
        """Requests that finished since the last call."""
        outputs: list[Output] = []
        while True:
            try:
                result = self._manager.output_router.output_queue.get_nowait()
            except queue.Empty:
                return outputs
            outputs.append(Output(result.request_id, result.generated_tokens, result.logprobs))

    def standing(self) -> bool:
        """Whether any request stands on KV."""
        return bool(self._scheduler.active_requests)

    def retract(self) -> None:
        """Put every request that stands on KV back, in order, before the queue; its KV is computed anew."""
        scheduler = self._scheduler
        again = [state.create_equivalent_initial_request() for state in scheduler.active_requests.values()]
        queued = [scheduler.waiting_requests[rollout] for rollout in scheduler.waiting_requests_order]
        for rollout in list(scheduler.active_requests):
            scheduler.finish_request(rollout)
        scheduler.waiting_requests.clear()
        scheduler.waiting_requests_order.clear()
        for state in again + queued:
            scheduler.add_waiting_request(state)
        scheduler.block_new_requests = False

    def _work(self) -> Work:
        decoding = kv_tokens = prompt_tokens = 0
        rollouts = []
        for entry in self._processor.inputs_and_outputs.requests_in_batch:
            state, size = entry.state, entry.query_length
            rollouts.append(state.request_id)
            # A request decodes when its context, all but the newest token, is in the cache already.
            if size == 1 and state.generated_tokens:
                decoding += 1
                kv_tokens += state.position_offset - size
            else:
                prompt_tokens += size
        return Work(decoding, kv_tokens, prompt_tokens, rollouts)


def _output(state: Any) -> Output:
    # Also right for a preempted request, whose earlier tokens have become part of its prompt.
    result = state.to_generation_output()
    return Output(result.request_id, result.generated_tokens, result.logprobs)
