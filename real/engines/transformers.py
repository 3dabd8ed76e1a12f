"""The embedded engine, as a child process: transformers' continuous batching on one model, on CPU or GPU.

Two threads: one reads commands from the socket, the other is transformers' batching loop, which carries them out
between two steps (see `batching`). So a command acts at a step boundary: a step that had begun completes and its
tokens count, and while the engine is paused the loop stands at that boundary.

Run as `python -m rlsched.real.engines.transformers --fd N --parent PID`.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import torch
import transformers

from .. import answers, commands, wire
from ..child import adopt
from ..config import EngineConfig
from ..memory import resident
from ..model import build, fill
from ..pacing import EnginePace, Pacer
from ..weights import Group, Staging, WeightSet
from . import Capabilities
from .batching import Batcher, Output, Work, seed_sampling
from .residence import Residence

#: Exit code of a child whose batching loop died.
LOOP_DIED = 3


class Request(msgspec.Struct):
    """What the engine remembers of a live request."""

    forced: bool
    version: int | None = None  # installed when its computation began


class TransformersEngine:
    """State and commands of the engine. Everything but `post` and `serve` runs in the loop's thread."""

    #: What `bare` takes away.
    residence: ClassVar[type[Residence]] = Residence
    sharing: ClassVar[bool] = False

    def __init__(self, config: EngineConfig, port: wire.Port) -> None:
        self._config = config
        self._port = port
        self._pace = config.pace or EnginePace()
        torch.set_num_threads(config.threads)
        self._model = build(config.model).to(config.device)
        self._batcher = Batcher(self._model, config, self._control, self._begin_step, self.sharing)
        self._weights = WeightSet(self._model)
        # Level 1 keeps the weights in host memory, which is where a CPU engine has them.
        levels = (1, 2) if config.device == "cpu" else (2,)
        self._residence = self.residence(self._weights, self._batcher.cache, levels)
        self._staging = Staging()
        self._group = Group()
        self._inbox: queue.SimpleQueue[wire.Call | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._requests: dict[str, Request] = {}
        self._paused = False
        self._forget()

    def _forget(self) -> None:
        self._steps: list[answers.Step] | None = None
        self._work: Work | None = None
        self._stepped = 0  # when the last step ended
        self._began = 0
        self._step_pacer = Pacer()
        self._work_pacer = Pacer()

    # ------------------------------------------------------------ threads

    def post(self, call: wire.Call) -> None:
        """Hand a command to the loop."""
        self._inbox.put(call)

    def close(self) -> None:
        """Let `serve` return."""
        self._closing.set()

    def serve(self) -> Exception | None:
        """Run until closed; what killed the loop, if something did."""
        self._batcher.start()
        while self._batcher.running and not self._closing.wait(0.05):
            pass
        if not self._batcher.running:
            return self._batcher.fatal or RuntimeError("the batching loop ended by itself")
        self._batcher.stopping = True
        self._inbox.put(None)  # in case the loop waits for a command
        self._batcher.stop()
        return None

    def _control(self) -> None:
        self._end_step()
        for output in self._batcher.ended():
            forced = self._requests[output.rollout].forced
            stopped = not forced and output.tokens[-1] == self._config.eos
            self._tell(output, "stop" if stopped else "length")
        while not self._batcher.stopping:
            busy = bool(self._requests) and not self._paused
            if not busy:
                self._step_pacer.rest()
            try:
                call = self._inbox.get(block=not busy)
            except queue.Empty:
                return
            if call is not None:
                self._answer(call)

    def _answer(self, call: wire.Call) -> None:
        try:
            with torch.no_grad():
                result = self._execute(call.command)
        except wire.Refused as refusal:
            self._port.send(wire.Failure(call.id, str(refusal), refused=True))
        except Exception as error:
            traceback.print_exc()
            self._port.send(wire.Failure(call.id, f"{type(error).__name__}: {error}", refused=False))
        else:
            self._port.send(wire.Answer(call.id, result))

    def _tell(self, output: Output, reason: str) -> None:
        request = self._requests.pop(output.rollout)
        version = self._residence.version if request.version is None else request.version
        now = time.monotonic_ns()
        self._port.notify(answers.Ended(output.rollout, output.tokens, output.logprobs, reason, version, now))

    # ------------------------------------------------------------ steps

    def _begin_step(self, work: Work) -> None:
        # Continuous work is timed from the end of the step before, so that nothing between two steps is lost.
        self._began = self._stepped if self._step_pacer.chained else time.monotonic_ns()
        self._step_pacer.start()
        self._work = work
        for rollout in work.rollouts:
            request = self._requests[rollout]
            if request.version is None:
                request.version = self._residence.version

    def _end_step(self) -> None:
        work, self._work = self._work, None
        if work is None:
            return
        worked = time.monotonic_ns()
        if self._config.pace is not None:
            self._step_pacer.hold(self._pace.step.of(work.decoding, work.kv_tokens, work.prompt_tokens))
        self._stepped = time.monotonic_ns()
        if self._steps is not None:
            elapsed, own = self._stepped - self._began, worked - self._began
            self._steps.append(answers.Step(elapsed, own, work.decoding, work.kv_tokens, work.prompt_tokens))

    # ------------------------------------------------------------ commands

    def _execute(self, command: commands.Command) -> answers.Result:
        match command:
            case commands.Submit():
                return self._submit(command)
            case commands.Abort(rollouts):
                return self._abort(rollouts)
            case commands.Pause():
                self._paused = True
                return self._progress()
            case commands.Resume():
                return self._resume()
            case commands.Flush(recompute):
                return self._flush(recompute)
            case commands.Sleep(level):
                return self._sleep(level)
            case commands.Wake(tags):
                return self._wake(tags)
            case commands.BeginUpdate(version):
                return self._begin_update(version)
            case commands.CopyBucket(path, size, pieces):
                return self._take(lambda: self._weights.copy(self._staging.at(path, size), pieces))
            case commands.ReceiveBucket(bucket_bytes, index):
                pieces = self._weights.buckets(bucket_bytes)[index]
                return self._take(lambda: self._group.receive(self._weights, pieces))
            case commands.ReadBucket(path, bucket_bytes, index):
                pieces = self._weights.buckets(bucket_bytes)[index]
                return self._take(lambda: self._weights.read(Path(path), pieces))
            case commands.EndUpdate(version):
                return self._end_update(version)
            case commands.JoinGroup(address, rank, world_size, timeout_s):
                self._group.join(address, rank, world_size, timeout_s)
                return answers.Done()
            case commands.LeaveGroup():
                self._group.leave()
                return answers.Done()
            case commands.Trace(on):
                steps, self._steps = self._steps, [] if on else None
                return answers.Steps(steps or [])
            case commands.Checksum():
                return answers.Digest(self._residence.checksum(), self._residence.version)
            case commands.Count():
                return self._count()
            case commands.Reset(seed):
                return self._reset(seed)
        raise wire.Refused(f"not a command for an engine: {type(command).__name__}")

    def _submit(self, command: commands.Submit) -> answers.Done:
        total = len(command.tokens) + command.max_new_tokens
        # Each of these would kill the batching loop, or never end.
        if command.rollout in self._requests:
            raise wire.Refused(f"rollout {command.rollout} is live already")
        if not command.tokens or command.max_new_tokens < 1:
            raise wire.Refused("a request needs at least one token of input and one to generate")
        if total > self._max_request_tokens:
            raise wire.Refused(f"{total} tokens of prompt and output exceed {self._max_request_tokens}")
        if not all(0 <= token < self._config.model.vocab for token in command.tokens):
            raise wire.Refused(f"token out of the vocabulary of {self._config.model.vocab}")
        self._requests[command.rollout] = Request(command.forced)
        self._batcher.add(command.rollout, command.tokens, command.max_new_tokens, command.forced)
        return answers.Done()

    def _abort(self, rollouts: list[str] | None) -> answers.Aborted:
        chosen = list(self._requests) if rollouts is None else [r for r in rollouts if r in self._requests]
        for rollout in chosen:
            self._tell(self._batcher.cancel(rollout), "abort")
        return answers.Aborted(chosen)

    def _resume(self) -> answers.Progress:
        self._residence.require_usable()
        self._paused = False
        return self._progress()

    def _flush(self, recompute: bool) -> answers.Flushed:
        if self._batcher.standing():
            if not recompute:
                return answers.Flushed(False)
            self._batcher.retract()
        self._residence.drop_kv()
        return answers.Flushed(True)

    def _sleep(self, level: int) -> answers.Slept:
        self._require_pause()
        if self._batcher.standing():
            raise wire.Refused("live requests stand on the KV: abort or retract them first")
        with self._held(self._pace.sleep.of(level)):
            before, after = self._residence.sleep(level)
        return answers.Slept(level, before, after, before - after)

    def _wake(self, tags: list[str]) -> answers.Woken:
        with self._held(self._pace.wake.of(len(tags))):
            self._residence.wake(tags)
        return answers.Woken(self._residence.awake, self._residence.usable)

    def _begin_update(self, version: int) -> answers.Done:
        self._require_pause()
        self._residence.begin_update(version)
        self._work_pacer.rest()
        self._work_pacer.start()
        return answers.Done()

    def _take(self, copy: Callable[[], int]) -> answers.Moved:
        self._residence.require_update()
        began = time.monotonic_ns()
        copied = copy()
        self._residence.received(copied)
        if self._config.pace is not None:
            self._work_pacer.hold(self._pace.bucket.of(copied))
        return answers.Moved(copied, time.monotonic_ns() - began)

    def _end_update(self, version: int) -> answers.Updated:
        self._work_pacer.rest()
        size = self._residence.end_update(version)
        return answers.Updated(version, size, self._residence.checksum(), self._batcher.progress())

    def _reset(self, seed: int) -> answers.Done:
        if self._requests:
            raise wire.Refused(f"{len(self._requests)} requests are live")
        if self._residence.asleep:
            self._wake(sorted(self._residence.asleep))
        self._group.leave()
        fill(self._model, self._config.model)
        self._residence.forget()
        self._residence.drop_kv()
        seed_sampling(seed)
        self._paused = False
        self._forget()
        return answers.Done()

    # ------------------------------------------------------------ answers and conditions

    @property
    def _max_request_tokens(self) -> int:
        return min(self._batcher.kv_tokens, self._config.model.max_positions)

    def _require_pause(self) -> None:
        if not self._paused:
            raise wire.Refused("only inside a pause")

    @contextmanager
    def _held(self, cost: int) -> Iterator[None]:
        self._work_pacer.rest()  # an update that broke off may have left a chain
        self._work_pacer.start()
        yield
        if self._config.pace is not None:
            self._work_pacer.hold(cost)
        self._work_pacer.rest()

    def _progress(self) -> answers.Progress:
        return answers.Progress(self._batcher.progress(), self._residence.version)

    def _count(self) -> answers.Counted:
        pacers = (self._step_pacer, self._work_pacer)
        return answers.Counted(
            held=sum(p.held for p in pacers),
            declared_ns=sum(p.declared_ns for p in pacers),
            overruns=sum(p.overruns for p in pacers),
            overrun_ns=sum(p.overrun_ns for p in pacers),
            cpu_ns=time.process_time_ns(),
            rss=resident(),
        )

    def loaded(self) -> answers.Loaded:
        """The answer to `Load`."""
        capabilities = Capabilities(
            engine="transformers",
            version=transformers.__version__,
            device=torch.device(self._config.device).type,
            max_request_tokens=self._max_request_tokens,
            kv_tokens=self._batcher.kv_tokens,
            max_requests=self._config.max_requests,
            max_batch_tokens=self._config.max_batch_tokens,
            pause_modes=("keep",),
            flush_live=True,
            sleep_levels=self._residence.levels,
            sleep_frees=("weights", "kv"),
            wake_tags=("weights", "kv"),
            transports=("shared", "broadcast", "disk"),
            in_place_update=True,
            abort_partials=True,
            step_trace=True,
        )
        return answers.Loaded(msgspec.to_builtins(capabilities), self._weights.nbytes, self._weights.checksum())


def main(kind: type[TransformersEngine] = TransformersEngine) -> int:
    """Serve one parent until it closes the socket; the exit code."""
    port = wire.Port(adopt())
    first = port.receive()
    if first is None or not isinstance(first.command, commands.Load):
        print("the first command must be Load", file=sys.stderr)
        return 2
    engine = kind(msgspec.convert(first.command.config, EngineConfig), port)
    port.send(wire.Answer(first.id, engine.loaded()))

    def read() -> None:
        while (call := port.receive()) is not None:
            engine.post(call)
        engine.close()

    threading.Thread(target=read, daemon=True).start()
    error = engine.serve()
    if error is None:
        return 0
    traceback.print_exception(error)
    port.notify(answers.Fatal(f"{type(error).__name__}: {error}"))
    return LOOP_DIED


def run(entry: Any) -> None:
    """Leave without the interpreter's teardown, which may wait for threads of a library."""
    code = entry()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run(main)
