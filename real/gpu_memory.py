"""What sleep and offload give back on the GPU, measured from outside of the processes that do it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from msgspec.structs import replace

from .devices import kind
from .gpu import MB, Seen, demand, rigged, samples, say, whole
from .rig import BUCKET, Rig
from .setup import Setup

ENOUGH = 0.8
"""Of the bytes that a part has, the share that its sleep must give back."""


class Gauge:
    """Memory in use, from outside of the process that uses it: the GPU driver's count, or the process's on the host."""

    def __init__(self, device: str, pid: int) -> None:
        self._device = device
        self._pid = pid

    def read(self) -> int:
        """Bytes."""
        if kind(self._device) == "cuda":
            from . import cuda

            return cuda.used(self._device)
        pages = int(Path(f"/proc/{self._pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")


def freed_by(rig: Rig, level: int) -> int:
    """Bytes that this sleep is to give back here, by what the engine says that it can."""
    sizes, able = rig.engine_bytes(0), rig.engines[0].capabilities
    # On a GPU level 1 moves the weights to the host; on a CPU they are there.
    leave = ("weights", "kv") if level == 2 or able.device == "cuda" else ("kv",)
    return sum(size for part, size in sizes.items() if part in leave and part in able.sleep_frees)


async def sleep(setup: Setup, rig_of: type[Rig] = Rig, bucket: int = BUCKET) -> Seen:
    """Each level of sleep, measured from outside, and the same tokens afterwards; then the trainer's offload.

    After level 2 the weights come from the trainer, in buckets of `bucket` bytes.
    """
    async with rigged(setup, rig_of) as rig:
        engine = rig.engines[0]
        gauge = Gauge(setup.engine.device, engine.child.pid)
        wanted = await say(rig)
        seen: Seen = {"engine": f"{engine.capabilities.engine} {engine.capabilities.version}"}
        for level in sorted(engine.capabilities.sleep_levels, reverse=True):
            await engine.pause()
            awake = gauge.read()
            began = time.perf_counter()
            await engine.sleep(2 if level == 2 else 1)
            seconds, asleep = time.perf_counter() - began, gauge.read()
            began = time.perf_counter()
            await engine.wake(["weights"])
            weights_s, weights = time.perf_counter() - began, gauge.read()
            if level == 2:
                whole(await rig.transport("ipc", bucket).push(rig.trainer, [engine], 0))
            began = time.perf_counter()
            await engine.wake(["kv"])
            kv_s, again = time.perf_counter() - began, gauge.read()
            await engine.resume()
            expected = freed_by(rig, level)
            seen |= {
                f"level {level}: MB awake": round(awake / MB),
                f"level {level}: MB asleep": round(asleep / MB),
                f"level {level}: MB freed": round((awake - asleep) / MB),
                f"level {level}: MB to be freed": round(expected / MB),
                f"level {level}: MB with weights": round(weights / MB),
                f"level {level}: MB awake again": round(again / MB),
                f"level {level}: sleep s": round(seconds, 3),
                f"level {level}: wake weights s": round(weights_s, 3),
                f"level {level}: wake kv s": round(kv_s, 3),
            }
            demand(
                awake - asleep >= ENOUGH * expected,
                f"level {level} gave {(awake - asleep) / MB:.0f} MB back, {expected / MB:.0f} are to be freed",
                seen,
            )
            demand(await say(rig) == wanted, f"other tokens after level {level}", seen)
        return seen | {"same tokens": True} | await offload(rig)


async def offload(rig: Rig) -> Seen:
    """The trainer's parameters and optimizer to the host and back."""
    gauge = Gauge(rig.setup.trainer.device, rig.trainer.child.pid)
    await rig.trainer.train(samples(rig.setup), 1)  # before its first step Adam has no state
    before = gauge.read()
    began = time.perf_counter()
    moved = (await rig.trainer.offload(["optimizer", "parameters"])).moved
    away_s, after = time.perf_counter() - began, gauge.read()
    began = time.perf_counter()
    back = (await rig.trainer.load(["optimizer", "parameters"])).moved
    load_s = time.perf_counter() - began
    demand(moved == back, f"{moved} bytes left the device, {back} came back")
    seen: Seen = {
        "offload: MB moved": round(moved / MB),
        "offload: MB freed": round((before - after) / MB),
        "offload s": round(away_s, 3),
        "load s": round(load_s, 3),
    }
    demand(before - after >= ENOUGH * moved, "the offload gave less back than it moved", seen)
    return seen


class IpcRig(Rig):
    """A rig whose vLLM takes weights by its own IPC transfer."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._recipe = replace(self._recipe, module="rlsched.real.engines.vllm_ipc")


async def vllm_transfer(setup: Setup) -> Seen:
    """What level 2 threw away comes back through vLLM's own IPC transfer, in one bucket: none may split a parameter."""
    return await sleep(setup, IpcRig, setup.engine.model.parameters() * 4 + 4096)
