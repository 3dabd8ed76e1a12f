"""What the GPU check does with engine and trainer: each function starts its own children and says what it saw.

The same functions run dry on a CPU, where the staging buffer is shared memory. What sleeps and offloads give back is
measured in `gpu_memory`. Importing this loads no torch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any

from msgspec.structs import replace

from rlsched.errors import WorldError
from rlsched.history import Reader
from rlsched.policy import Policy

from . import canary_run
from .commands import Sample
from .devices import kind
from .job import engines, perform
from .probe import Costs, probe
from .rig import BUCKET, Rig
from .setup import Setup
from .transport import Pushed

Seen = dict[str, Any]
"""Names, with units where they have any, and what was seen."""
MB = 1e6


class Unmet(WorldError):  # noqa: N818
    """A step saw what must not be."""

    def __init__(self, why: str, seen: Seen) -> None:
        super().__init__(why)
        self.seen = seen
        """By then."""


def demand(condition: bool, why: str, seen: Seen | None = None) -> None:
    """Raise Unmet unless it is so; `seen` is what the step saw by then."""
    if not condition:
        raise Unmet(why, seen or {})


def available() -> str:
    """Why there is no GPU to use; empty: there is one."""
    try:
        import torch
    except ImportError as error:
        return str(error)
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees none"


def facts(device: str) -> Seen:
    """What is there."""
    import torch
    import transformers

    seen: Seen = {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }
    if kind(device) != "cuda":
        return seen | {"device": "cpu", "cores": len(os.sched_getaffinity(0))}
    properties = torch.cuda.get_device_properties(device)
    free, total = torch.cuda.mem_get_info(device)
    return seen | {
        "device": properties.name,
        "compute capability": f"{properties.major}.{properties.minor}",
        "GPUs": torch.cuda.device_count(),
        "CUDA": torch.version.cuda,
        "memory MB": round(total / MB),
        "free MB": round(free / MB),
        "cores": len(os.sched_getaffinity(0)),
    }


def ipc(device: str, size: int) -> Seen:
    """A buffer of this process, opened by another one: it finds the same bytes, and what it writes is seen here."""
    import torch

    from . import cuda
    from .digest import fingerprint
    from .weights import Staging

    cuda.choose(device)
    file = os.memfd_create("rlsched-gpu", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, size)
        path = f"/proc/{os.getpid()}/fd/{file}"
        buffer = Staging(device).at(path, size)
        buffer.copy_(torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)))
        cuda.settle(device)
        told, first = int(fingerprint(buffer)), int(buffer[0])
        command = [sys.executable, "-m", "rlsched.real.gpu_peer", path, str(size), device]
        began = time.perf_counter()
        peer = subprocess.run(command, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        demand(peer.returncode == 0, f"the other process: {(peer.stderr.strip() or 'no word').splitlines()[-1]}")
        demand(int(peer.stdout) == told, f"the other process found {peer.stdout.strip()}, here is {told}")
        demand(int(buffer[0]) == first ^ 255, "what the other process wrote isn't seen here: it has a copy")
    finally:
        os.close(file)
    return {"MB": size / MB, "same bytes": True, "same memory": True, "other process s": round(seconds, 2)}


@asynccontextmanager
async def rigged(setup: Setup, rig_of: type[Rig] = Rig) -> AsyncIterator[Rig]:
    """A rig of one engine, closed at the end."""
    rig = await rig_of.start(setup, 1)
    try:
        yield rig
    finally:
        await rig.close()


def samples(setup: Setup) -> list[Sample]:
    """A batch of the job's size, as if engines had made it."""
    shape, task, length = setup.shape, setup.task, setup.shape.budget // 2 or 1
    return [
        Sample(
            task.prompt(i // shape.samples),
            [task.first_symbol + (i + j) % task.symbols for j in range(length)],
            [-2.0] * length,
            i % 3 / 2,
            i // shape.samples,
        )
        for i in range(shape.b * shape.samples)
    ]


async def say(rig: Rig) -> list[list[int]]:
    """Tokens of some prompts, one request after the other: in bfloat16 they depend on what else is in the batch."""
    return [(await rig.ask(0, [rig.setup.task.prompt(i)], 16))[0].tokens for i in range(4)]


def whole(pushed: Pushed) -> Pushed:
    """The push, if it reached the engine whole."""
    for error in pushed.failed.values():
        raise WorldError(f"the push failed: {type(error).__name__}: {error}")
    return pushed


async def push(setup: Setup) -> Seen:
    """A trained version, bucket by bucket into the engine; equal digests, and it generates with them."""
    async with rigged(setup) as rig:
        engine = rig.engines[0]
        trained = await rig.trainer.train(samples(setup), 1)
        transport = rig.transport("ipc", BUCKET)
        await engine.pause()
        seconds: list[float] = []
        for _ in range(3):
            began = time.perf_counter()
            pushed = whole(await transport.push(rig.trainer, [engine], 1))
            seconds.append(time.perf_counter() - began)
        await engine.resume()
        (said,) = await rig.ask(0, [setup.task.prompt(0)], 4)
        demand(pushed.checksum != engine.initial_checksum, "training changed no weight")
        demand(said.version == 1, f"tokens are said to be of version {said.version}")
        size, bucket_s = sum(pushed.bytes), median(pushed.ns) / 1e9
        return {
            "engine": f"{engine.capabilities.engine} {engine.capabilities.version}",
            "parameters": setup.engine.model.parameters(),
            "MB": round(size / MB, 1),
            "buckets": len(pushed.bytes),
            "bucket s": round(bucket_s, 5),
            "GB/s in buckets": round(size / sum(pushed.ns), 2),
            "push s, digests included": round(median(seconds), 3),
            "update s": round(sum(trained.phase_ns.values()) / 1e9, 3),
            "largest logprob gap": trained.max_logprob_gap,
        }


async def costs(setup: Setup) -> Costs:
    """What each component costs here, as fast as it goes."""
    async with rigged(setup) as rig:
        return await probe(rig)


async def canary(setup: Setup, policy: Policy, dtype: str, history: Path) -> Seen:
    """A whole run on canary weights, each token compared with its label and with what was installed."""
    job = canary_run.canary(setup)
    model = replace(job.engine.model, dtype=dtype)
    job = replace(job, engine=replace(job.engine, model=model), trainer=replace(job.trainer, model=model))
    rig = await Rig.start(job, engines(policy, job))
    try:
        _, end = await perform(rig, policy, 0, history)
    finally:
        await rig.close()
    demand(end.ok, end.why)
    found = canary_run.audit(Reader(history).events(), canary_run.logged(history))
    wrong = [str(m) for each in (*found.labels.values(), *found.installs.values()) for m in each]
    demand(found.good, f"tokens contradict: {wrong[0] if wrong else 'there are none'}")
    return {
        "dtype": dtype,
        "rollouts": found.rollouts,
        "tokens": found.tokens,
        "mixed": found.mixed,
        "wrong": len(wrong),
    }
