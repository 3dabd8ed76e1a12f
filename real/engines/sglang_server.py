"""SGLang's own server, with the stand-ins of `sglang_shim` and a hook in its scheduler.

The hook goes in by SGLang's plugin interface (`sglang.srt.plugins`). It changes nothing that the scheduler decides:

* `Scheduler.run_batch` is held to the declared minimum of the step, before its tokens go out;
* after each step, each pause and each request taken in, a record goes to the engine child (see `link`);
* once round its loop the scheduler looks for the child's orders: to say that it comes by, and to seed sampling;
* while it is paused the scheduler waits for messages instead of polling, as it does when it is idle.

Run as `python -m rlsched.real.engines.sglang_server ARGUMENTS`, with the arguments of `sglang.launch_server`. SGLang
spawns its other processes, which import the main module anew: so the stand-ins and the hook are there, too.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from ..answers import Step
from ..pacing import Pacer
from . import sglang_shim
from .family import die_with_parent
from .link import LINK, Obeyed, Order, Record, Stepped, Stood, Taken, Terms, Totals, frame, unframe

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"


class Hook:
    """What is done around the scheduler's methods. Each method takes the original one and its arguments."""

    def __init__(self, terms: Terms) -> None:
        self._address = terms.address
        self._pace = terms.pace
        self._pacer = Pacer()
        self._peer: socket.socket | None = None
        self._rest = b""
        self._stepped = 0  # when the last step ended
        self._step: Step | None = None

    def register(self) -> None:
        """Ask SGLang to put the hook in, in whichever process has a scheduler."""
        hooks = importlib.import_module("sglang.srt.plugins.hook_registry")
        around: dict[str, Callable[..., Any]] = {
            "ingest_requests": self.ingest_requests,
            "run_batch": self.run_batch,
            "process_batch_result": self.process_batch_result,
            "handle_generate_request": self.handle_generate_request,
            "pause_generation": self.pause_generation,
            "on_idle": self.on_idle,
            "_record_scheduler_state_for_paused_engine": self.paused,
        }
        for method, hook in around.items():
            hooks.HookRegistry.register(f"{SCHEDULER}.{method}", hook, hooks.HookType.AROUND)

    def _tell(self, record: Record) -> None:
        assert self._peer is not None, "the scheduler's loop has not begun"
        self._peer.sendall(frame(record))

    # ------------------------------------------------------------ orders

    def ingest_requests(self, original: Callable[..., Any], scheduler: Any, *rest: Any, **options: Any) -> Any:
        """Once round the loop: carry out what the child has ordered, then take messages."""
        if self._peer is None:
            self._connect(scheduler)
        for order in self._orders():
            if order.seed is not None:
                # Sampling draws from torch's default generator.
                importlib.import_module("torch").manual_seed(order.seed)
            self._tell(Obeyed(order.number))
        return original(scheduler, *rest, **options)

    def _connect(self, scheduler: Any) -> None:
        self._peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._peer.connect(f"\0{self._address}")
        # An idle scheduler sleeps until one of its sockets has something: an order wakes it, too.
        poller = getattr(scheduler.idle_sleeper, "poller", None)
        if poller is not None:
            poller.register(self._peer.fileno(), importlib.import_module("zmq").POLLIN)

    def _orders(self) -> list[Order]:
        assert self._peer is not None
        try:
            self._rest += self._peer.recv(1 << 12, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return []
        found, self._rest = unframe(self._rest)
        return [msgspec.msgpack.decode(message, type=Order) for message in found]

    # ------------------------------------------------------------ steps

    def run_batch(self, original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any, **options: Any) -> Any:
        """Compute a step, and hold it."""
        began = self._stepped if self._pacer.chained else time.monotonic_ns()
        self._pacer.start()
        decoding, kv_tokens, prompt_tokens = work(batch)
        result = original(scheduler, batch, *rest, **options)
        worked = time.monotonic_ns()
        if self._pace is not None:
            self._pacer.hold(self._pace.of(decoding, kv_tokens, prompt_tokens))
        self._stepped = time.monotonic_ns()
        self._step = Step(self._stepped - began, worked - began, decoding, kv_tokens, prompt_tokens)
        return result

    def process_batch_result(self, original: Callable[..., Any], scheduler: Any, batch: Any, *rest: Any) -> Any:
        """Append a step's tokens, and tell how many each request has."""
        requests = list(batch.reqs)  # finished ones may leave the batch
        result = original(scheduler, batch, *rest)
        if self._step is not None:
            pacer = self._pacer
            totals = Totals(pacer.held, pacer.declared_ns, pacer.overruns, pacer.overrun_ns)
            self._tell(Stepped(self._step, {r.rid: len(r.output_ids) for r in requests}, totals))
            self._step = None
        return result

    def on_idle(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Nothing to compute: the next step follows no other."""
        self._pacer.rest()
        return original(scheduler)

    # ------------------------------------------------------------ requests and pauses

    def handle_generate_request(self, original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        """Take a request in, and tell."""
        result = original(scheduler, request)
        self._tell(Taken(request.rid))
        return result

    def pause_generation(self, original: Callable[..., Any], scheduler: Any, request: Any) -> Any:
        """Pause, and tell what stands on KV."""
        result = original(scheduler, request)
        self._pacer.rest()
        standing = {r.rid for r in scheduler.collect_inflight_reqs() if not r.finished()}
        if scheduler.chunked_req is not None:
            standing.add(scheduler.chunked_req.rid)
        self._tell(Stood(sorted(standing)))
        return result

    def paused(self, original: Callable[..., Any], scheduler: Any) -> Any:
        """Once round the loop of a paused scheduler: wait for a message."""
        result = original(scheduler)
        if scheduler.idle_sleeper is not None:
            scheduler.idle_sleeper.maybe_sleep()
        return result


def work(batch: Any) -> tuple[int, int, int]:
    """Requests that decode, tokens of context that they read, and tokens computed for all others."""
    if batch.forward_mode.is_decode():
        # The lengths count the step's own token.
        return len(batch.reqs), int(batch.seq_lens_cpu.sum()) - len(batch.reqs), 0
    return 0, 0, int(batch.extend_num_tokens or 0)


def prepare() -> None:
    """Make a process of the server ready: it dies with its parent, has the stand-ins, and the hook if one is wanted."""
    die_with_parent()
    sglang_shim.install()
    if LINK in os.environ:
        Hook(msgspec.json.decode(os.environ[LINK], type=Terms)).register()


def main(arguments: list[str]) -> None:
    """Serve until killed."""
    importlib.import_module("sglang.srt.plugins").load_plugins()
    parse = importlib.import_module("sglang.srt.server_args").prepare_server_args
    importlib.import_module("sglang.launch_server").run_server(parse(arguments))


if __name__ in ("__main__", "__mp_main__"):
    prepare()
if __name__ == "__main__":
    main(sys.argv[1:])
