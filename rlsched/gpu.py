"""The GPU check: a list of independent steps, each in a process of its own under a limit of its own.

A step that fails, hangs or dies takes no other with it. Dry, the very same steps run on the CPU with small models, so
that only the CUDA calls themselves wait for a GPU. One step by itself: `python -m rlsched.gpu STEP FOLDER full|dry`.
"""

import asyncio
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from . import report
from .naming import parse
from .outcome import Outcome, Seen
from .real import gpu, gpu_memory
from .real.config import EngineConfig, TrainerConfig
from .real.installs import engine
from .real.model import QWEN3_06B, ModelSpec
from .real.pacing import EnginePace, StepCost, TrainerPace, WorkCost
from .real.probe import Costs
from .real.setup import Setup
from .shape import Shape
from .validate import validate
from .verdict import Verdict
from .workload import Length, Workload

POLICIES = ("verl-hybrid,publish.bucket_mb=64", "areal-async,admit.eta=1,publish.bucket_mb=64")
"""Both presets; with buckets of the size that the probes measure, for a bucket of 1 GB costs more than one of 64 MB."""
SLACK = 2.0
"""Declared minima of a paced run over what the probes measured: the two processes share the GPU."""
PATIENCE = 4
"""Times its limit that a dry step may take: nothing of a dry run is about speed."""
WIDE = ModelSpec(vocab=512, layers=2, hidden=768, heads=12, kv_heads=12, head_dim=64, intermediate=3072, init_std=0.02)
"""For dry pushes and sleeps: 79 MB, enough to be seen in a process's memory."""


class Plan(Struct, frozen=True):
    """What the steps run on."""

    dry: bool
    device: str
    weights: Setup
    """For pushes and sleeps: greedy."""
    job: Setup
    """For whole runs."""
    repeats: int
    """Of each policy's real run."""


def plan(dry: bool) -> Plan:
    """The full plan is for one GPU, which engine and trainer share."""
    if dry:
        job = Setup(shape=Shape(b=2, samples=2, steps=2, budget=48))
        small = EngineConfig(model=WIDE, temperature=0.0, kv_blocks=256)
        return Plan(True, "cpu", replace(job, engine=small, trainer=TrainerConfig(model=WIDE)), job, 1)
    engine = EngineConfig(model=QWEN3_06B, device="cuda", kv_blocks=2048, max_batch_tokens=2048)
    trainer = TrainerConfig(model=QWEN3_06B, device="cuda")
    shape, lengths = Shape(b=4, samples=4, steps=3, budget=48), Length(kind="lognormal", mean=24.0)
    work = Workload(prompt=Length(mean=4.0), output=lengths)
    job = Setup(shape=shape, workload=work, engine=engine, trainer=trainer)
    return Plan(False, "cuda", replace(job, engine=replace(engine, temperature=0.0)), job, 3)


# ---------------------------------------------------------------- steps


def costs(plan: Plan, folder: Path) -> Seen:
    """Probe every component, unpaced."""
    kept = folder / "costs.json"
    kept.unlink(missing_ok=True)  # an earlier check's, should this one fail
    found = asyncio.run(gpu.costs(plan.job))
    kept.write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    phases = {f"{name} s a batch, s a token": seconds for name, seconds in found.phases.items()}
    buckets = {f"{kind}: bucket s": seconds for kind, seconds in found.bucket.items()}
    scalars = {k: v for k, v in msgspec.to_builtins(found).items() if isinstance(v, float)}
    return {name: _short(value) for name, value in (scalars | phases | buckets).items()}


def paced(setup: Setup, found: Costs) -> Setup:
    """The job with minima that this machine can keep, by its own measured costs."""
    batch = setup.shape.b * setup.shape.samples
    tokens = batch * (setup.shape.budget + setup.task.prompt_symbols + 1)

    def ns(seconds: float) -> int:
        return max(1, round(SLACK * seconds * 1e9))

    phases = {name: WorkCost(fixed=ns(fixed + each * tokens)) for name, (fixed, each) in found.phases.items()}
    step = found.step + found.seq * batch + found.kv * tokens
    engine = EnginePace(
        step=StepCost(a=ns(step), p=ns(found.prompt)),
        bucket=WorkCost(fixed=ns(max(found.bucket.values()))),
        sleep=WorkCost(fixed=ns(found.sleep)),
        wake=WorkCost(fixed=ns(max(found.wake_weights, found.wake_kv))),
    )
    trainer = TrainerPace(shift=WorkCost(fixed=ns(found.shift)), **phases)
    return replace(setup, engine=replace(setup.engine, pace=engine), trainer=replace(setup.trainer, pace=trainer))


def presets(plan: Plan, folder: Path) -> Seen:
    """Both presets for real, paced by the costs of that step, beside their simulation: checked and replayed."""
    kept = folder / "costs.json"
    setup = paced(plan.job, msgspec.json.decode(kept.read_bytes(), type=Costs)) if kept.exists() else plan.job.paced()
    return _validated(setup, folder, plan.repeats)


def unpaced(plan: Plan, folder: Path) -> Seen:
    """The same as fast as it goes, once: the GPU's own durations, reported and not judged."""
    inner = folder / "unpaced"
    inner.mkdir(exist_ok=True)
    return _validated(plan.job, inner, 1)


def _validated(setup: Setup, folder: Path, repeats: int) -> Seen:
    policies = [parse(name) for name in POLICIES]
    (folder / "report.json").unlink(missing_ok=True)
    found = validate(policies, setup, folder, repeats=repeats, seed=0, say=lambda what: print(what, file=sys.stderr))
    report.write_verdict(found, folder)
    runs = [run for group in found.real.values() for run in group] + list(found.sim.values())
    wrong = [f"{r.history}: {sum(r.report.counts.values())} violations" for r in runs if not r.report.ok]
    wrong += [f"{r.history} doesn't replay" for r in runs if r.replay.divergence is not None]
    seen: Seen = {"histories": len(runs), "violations": sum(sum(r.report.counts.values()) for r in runs)}
    seen["replayed"] = sum(r.replay.divergence is None for r in runs)
    for name, rows in found.rows.items():
        for row in rows:
            if row.bound is not None:
                told = f"{row.real:.4g} real, {row.sim:.4g} simulated, {row.error:+.1%}"
                seen[f"{name.split(',publish')[0]}: {row.name.split(',')[0]}"] = told
    gpu.demand(not wrong, "; ".join(wrong), seen)
    return seen


def prediction(plan: Plan, folder: Path) -> Seen:
    """What the paced runs say of the simulation. Not judged on a dry run: a busy CPU decides nothing."""
    kept = folder / "report.json"
    gpu.demand(kept.exists(), "the presets left no verdict")
    found = msgspec.json.decode(kept.read_bytes(), type=Verdict)
    judged = [(name, row) for name, rows in found.rows.items() for row in rows if row.bound is not None]
    missed = [f"{name}: {row.name} {row.error:+.1%}" for name, row in judged if not row.good]
    seen: Seen = {"judged": not plan.dry, "measures": len(judged), "within bounds": len(judged) - len(missed)}
    if not plan.dry:
        gpu.demand(not found.void, f"void: {'; '.join(found.void)}", seen)
        gpu.demand(not missed, f"out of bounds: {'; '.join(missed)}", seen)
    return seen


def canary(dtype: str) -> Callable[[Plan, Path], Seen]:
    """A run of the asynchronous preset on canary weights of this type."""

    def run(plan: Plan, folder: Path) -> Seen:
        history = folder / f"canary-{dtype}.jsonl"
        return asyncio.run(gpu.canary(plan.job, parse(POLICIES[1]), dtype, history))

    return run


def weights(measure: Callable[[Setup], Coroutine[Any, Any, Seen]], vllm: bool = False) -> Callable[[Plan, Path], Seen]:
    """A measurement on the greedy set-up."""

    def run(plan: Plan, folder: Path) -> Seen:
        return asyncio.run(measure(replace(plan.weights, engine_kind="vllm") if vllm else plan.weights))

    return run


class Step(Struct, frozen=True):
    """One step: what is passed on to the next is left in the folder."""

    limit_s: float
    run: Callable[[Plan, Path], Seen]
    needs: Literal["", "vllm", "vllm on a GPU"] = ""


STEPS: dict[str, Step] = {
    "device": Step(40, lambda plan, _: gpu.facts(plan.device)),
    "ipc": Step(60, lambda plan, _: gpu.ipc(plan.device, 1 << 20 if plan.dry else 256 << 20)),
    "push": Step(75, weights(gpu.push)),
    "sleep": Step(75, weights(gpu_memory.sleep)),
    "costs": Step(75, costs),
    "presets": Step(270, presets),
    "prediction": Step(20, prediction),
    "canary": Step(60, canary("float32")),
    "canary-bf16": Step(60, canary("bfloat16")),
    "vllm-push": Step(120, weights(gpu.push, vllm=True), "vllm"),
    "vllm-sleep": Step(120, weights(gpu_memory.sleep, vllm=True), "vllm"),
    "vllm-ipc": Step(120, weights(gpu_memory.vllm_transfer, vllm=True), "vllm on a GPU"),
    "unpaced": Step(90, unpaced),
}
"""In order: what says most about a new machine comes first."""


def missing(step: Step, dry: bool) -> str:
    """Why this step has nothing to run on here; empty: it has."""
    if dry and step.needs == "vllm on a GPU":
        return "CUDA IPC only"
    return engine("vllm").why if step.needs else ""


def conduct(names: Sequence[str], folder: Path, dry: bool, minutes: float, vllm_path: str = "") -> Iterator[Outcome]:
    """Run the steps one after the other, each in a process of its own; what became of each, as it ends.

    `vllm_path`: folders, as in PYTHONPATH, that hold a vLLM for this very interpreter; only vLLM's steps see them.
    """
    end = time.monotonic() + 60 * minutes
    environment = {**os.environ}
    if vllm_path:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (vllm_path, os.environ.get("PYTHONPATH"))))
        environment["RLSCHED_VLLM_PYTHON"] = sys.executable
    for name in names:
        left, own = end - time.monotonic(), STEPS[name].limit_s * (PATIENCE if dry else 1)
        if left < 1:
            yield Outcome(name, "failed", why=f"not run: the {minutes:g} minutes are over")
        else:
            yield apart(name, folder, dry, min(left, own), environment if STEPS[name].needs else os.environ)


def apart(name: str, folder: Path, dry: bool, limit_s: float, environment: Mapping[str, str]) -> Outcome:
    """Run a step in a process of its own; past its limit it is killed, and its children end with it."""
    command = [sys.executable, "-m", "rlsched.gpu", name, str(folder), "dry" if dry else "full"]
    log = folder / f"{name}.log"
    began = time.monotonic()
    with log.open("w") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, env=environment, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return Outcome(name, "failed", limit_s, why=f"not done within {limit_s:g} s (log: {log})")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
    seconds = round(time.monotonic() - began, 1)
    try:
        outcome = msgspec.json.decode(said, type=Outcome)
    except msgspec.DecodeError:
        return Outcome(name, "failed", seconds, why=f"its process ended with {process.returncode} (log: {log})")
    return replace(outcome, seconds=seconds)


def _short(value: object) -> object:
    """Numbers as a table has room for."""
    if isinstance(value, float):
        return float(f"{value:.4g}")
    return tuple(map(_short, value)) if isinstance(value, tuple) else value


def main(name: str, folder: str, how: str) -> int:
    """Run one step here; prints its outcome as JSON."""
    step, dry = STEPS[name], how == "dry"
    try:
        if why := missing(step, dry):
            outcome = Outcome(name, "skipped", why=why)
        else:
            outcome = Outcome(name, "passed", seen=step.run(plan(dry), Path(folder)))
    except Exception as error:
        traceback.print_exc()
        seen = error.seen if isinstance(error, gpu.Unmet) else {}
        outcome = Outcome(name, "failed", seen=seen, why=f"{type(error).__name__}: {error}")
    sys.stdout.write(msgspec.json.encode(outcome).decode())
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
