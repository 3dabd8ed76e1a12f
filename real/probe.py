"""Probes: what each component costs by itself, measured on a rig between runs and never in a compared one."""

import asyncio
import time
from collections.abc import Awaitable
from statistics import median
from typing import Any

import numpy as np
from msgspec import Struct

from rlsched.commands import Transport

from . import answers
from .commands import Sample
from .rig import BUCKET, Rig
from .transport import Checkpoints

NS = 1e9
ROUNDS = 5
"""Times that a short operation is measured; the median counts."""


class Costs(Struct, frozen=True):
    """Fitted costs in seconds; tokens of trainer phases are those of prompts and outputs."""

    step: float
    seq: float
    kv: float
    prompt: float
    phases: dict[str, tuple[float, float]]
    """Of each trainer phase: seconds a batch of the run's size, and seconds a token."""
    begin: dict[Transport, float]
    bucket: dict[Transport, float]
    submit: float
    """Seconds from a request's issue to the beginning of its first step, on an idle engine."""
    abort: float
    pause: float
    resume: float
    flush: float
    sleep: float
    wake_weights: float
    wake_kv: float
    shift: float
    step_misfit: float
    """Root mean square of the step fit's relative error."""


class Listener:
    """Collects what the children say while a probe runs."""

    def __init__(self) -> None:
        self.ended = asyncio.Event()
        self.wanted = 0
        self.at_ns: list[int] = []
        self.phases: dict[str, list[int]] = {}
        self._began = 0

    def on_ended(self, _engine: int, told: answers.Ended) -> None:
        self.at_ns.append(told.at_ns)
        if len(self.at_ns) >= self.wanted:
            self.ended.set()

    def on_phase(self, told: answers.Phase) -> None:
        if told.edge == "begin":
            self._began = told.at_ns
        else:
            self.phases.setdefault(told.phase, []).append(told.at_ns - self._began)

    async def wait(self, n: int) -> None:
        """Wait until ``n`` more requests have ended."""
        self.wanted = n
        self.at_ns.clear()
        self.ended.clear()
        await self.ended.wait()


async def probe(rig: Rig, engine: int = 0) -> Costs:
    """Measure everything; about ten paced seconds. The trainer's weights are changed: reset before a run."""
    ear = Listener()
    rig.listen(ear.on_ended, ear.on_phase, lambda _, __: None)
    client, shape = rig.engines[engine], rig.setup.shape
    batch = shape.b * shape.samples
    try:
        steps = await _steps(rig, ear, engine, batch)
        a, b, c, p, misfit = fit_steps(steps)
        submit = await _submit(rig, ear, engine, a + p * 4)
        abort = await _abort(rig, ear, engine, batch, a + b * batch)
        pause, resume, flush = await _controls(rig, engine)
        phases = await _phases(rig, ear, batch)
        begin: dict[Transport, float] = {}
        bucket: dict[Transport, float] = {}
        kinds: tuple[Transport, ...] = ("ipc", "broadcast", "disk")
        for kind in kinds:
            begin[kind], bucket[kind] = await _transfer(rig, engine, kind)
        sleep, wake_weights, wake_kv = await _sleep(rig, engine)
        shift = median([await timed(rig.trainer.offload(["optimizer"])), await timed(rig.trainer.load(["optimizer"]))])
        await client.resume()
    finally:
        rig.deaf()
    return Costs(
        *(a, b, c, p, phases, begin, bucket, submit, abort, pause, resume, flush, sleep),
        *(wake_weights, wake_kv, shift, misfit),
    )


async def timed(work: Awaitable[Any]) -> float:
    """Seconds that ``work`` takes."""
    began = time.perf_counter()
    await work
    return time.perf_counter() - began


def fit_steps(steps: list[answers.Step]) -> tuple[float, float, float, float, float]:
    """Step, sequence, KV and prompt costs in seconds by least squares, none negative, and the relative misfit."""
    x = np.array([[1.0, s.decoding, s.kv_tokens, s.prompt_tokens] for s in steps])
    y = np.array([s.elapsed_ns / NS for s in steps])
    kept = [0, 1, 2, 3]
    while True:
        solved = np.linalg.lstsq(x[:, kept], y, rcond=None)[0]
        negative = [k for k, value in zip(kept, solved, strict=True) if value < 0]
        if not negative:
            break
        kept = [k for k in kept if k not in negative]
    costs = np.zeros(4)
    costs[kept] = solved
    misfit = float(np.sqrt(np.mean(((x @ costs - y) / y) ** 2)))
    return float(costs[0]), float(costs[1]), float(costs[2]), float(costs[3]), misfit


async def _steps(rig: Rig, ear: Listener, engine: int, batch: int) -> list[answers.Step]:
    """Steps with one, a few and a full batch of requests, and with long prompts among them."""
    client, task, setup = rig.engines[engine], rig.setup.task, rig.setup
    await client.trace(True)
    serial = 0
    most = max(8, min(48, setup.shape.budget))
    for n, repeat in ((1, 1), (max(2, batch // 4), 1), (batch, 2), (batch, 1)):
        waiting = asyncio.create_task(ear.wait(n))
        await asyncio.sleep(0)
        for i in range(n):
            tokens = task.prompt(serial) * (1 if repeat == 1 else 1 + i % 6)
            await client.submit(f"probe-{serial}", tokens, most // 2 + i % (most // 2))
            serial += 1
        await waiting
    # The first step after a rest begins at the wake-up, not at a step's end.
    return [s for s in await client.trace(False) if s.elapsed_ns > 0]


async def _submit(rig: Rig, ear: Listener, engine: int, step: float) -> float:
    """Seconds from a submit's issue to the beginning of its first step, on an idle engine."""
    client, found = rig.engines[engine], []
    for i in range(ROUNDS):
        waiting = asyncio.create_task(ear.wait(1))
        await asyncio.sleep(0)
        began = time.monotonic_ns()
        await client.submit(f"submit-{i}", rig.setup.task.prompt(i), 1)
        await waiting
        found.append((time.monotonic_ns() - began) / NS - step)
    return max(0.0, median(found))


async def _abort(rig: Rig, ear: Listener, engine: int, batch: int, step: float) -> float:
    """Seconds of an abort beyond the rest of the step in progress.

    The aborts are spread over the phases of a step; the quickest one had the least rest to wait for, of which the
    expectation is taken off. A mean would take whatever held up any of them for a cost of all.
    """
    client, found = rig.engines[engine], []
    tries = 2 * ROUNDS
    for i in range(tries):
        names = [f"abort-{i}-{j}" for j in range(batch)]
        for j, name in enumerate(names):
            await client.submit(name, rig.setup.task.prompt(j), rig.setup.shape.budget)
        await asyncio.sleep(4 * step + step * i / tries)
        found.append(await timed(client.abort(names)))
    return max(0.0, min(found) - step / (tries + 1))


async def _controls(rig: Rig, engine: int) -> tuple[float, float, float]:
    """Seconds of a pause, a resume and a flush on an idle engine."""
    client = rig.engines[engine]
    pauses, resumes, flushes = [], [], []
    for _ in range(ROUNDS):
        pauses.append(await timed(client.pause()))
        flushes.append(await timed(client.flush()))
        resumes.append(await timed(client.resume()))
    return median(pauses), median(resumes), median(flushes)


async def _phases(rig: Rig, ear: Listener, batch: int) -> dict[str, tuple[float, float]]:
    """Seconds a batch and a token of each phase, from a short and a long batch; what surrounds the phases is
    counted to the last one."""
    shape, points = rig.setup.shape, []
    for length in (shape.budget // 6 or 1, shape.budget // 2 or 2) * 2:
        samples = []
        for i in range(batch):
            prompt = rig.setup.task.prompt(i // shape.samples)
            output = [rig.setup.task.first_symbol + (i + j) % rig.setup.task.symbols for j in range(length)]
            samples.append(Sample(prompt, output, [-2.0] * length, i % 3 / 2, i // shape.samples))
        ear.phases.clear()
        total = await timed(rig.trainer.train(samples, 1))
        seconds = {name: sum(ns) / NS for name, ns in ear.phases.items()}
        *_, last = seconds
        seconds[last] += total - sum(seconds.values())
        points.append((sum(len(s.prompt) + len(s.output) for s in samples), seconds))
    found: dict[str, tuple[float, float]] = {}
    for name in points[-1][1]:
        each, fixed = np.polyfit([tokens for tokens, _ in points], [s[name] for _, s in points], 1)
        found[name] = (float(fixed), max(0.0, float(each)))
    return found


async def _transfer(rig: Rig, engine: int, kind: Transport) -> tuple[float, float]:
    """Seconds of a transfer besides its buckets, and of a bucket; the first one forms the group and isn't counted."""
    client = rig.engines[engine]
    transport = rig.transport(kind, BUCKET)
    begins, buckets = [], []
    await client.pause()
    for i in range(ROUNDS):
        if isinstance(transport, Checkpoints):
            await transport.close()  # in a run every version is written anew
        began = time.perf_counter()
        pushed = await transport.push(rig.trainer, [client], 1)
        total = time.perf_counter() - began
        if i:
            begins.append(total - sum(pushed.ns) / NS)
            buckets += [ns / NS for ns in pushed.ns]
    await client.resume()
    return median(begins), median(buckets)


async def _sleep(rig: Rig, engine: int) -> tuple[float, float, float]:
    """Seconds of a level-2 sleep, pause included, and of waking weights and KV; leaves the engine as it was."""
    client, found = rig.engines[engine], []
    for _ in range(3):
        sleep = await timed(client.pause()) + await timed(client.sleep(2))
        weights = await timed(client.wake(["weights"]))
        await rig.transport("ipc", BUCKET).push(rig.trainer, [client], 1)
        kv = await timed(client.wake(["kv"])) + await timed(client.resume())
        found.append((sleep, weights, kv))
    asleep, with_weights, with_kv = zip(*found, strict=True)
    return median(asleep), median(with_weights), median(with_kv)
