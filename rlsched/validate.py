"""Validation: the same policies for real and in simulation, checked alike and compared.

Costs are fitted on component probes, never on a compared run.
"""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from .checker import check
from .errors import InputError, WorldError
from .facts import Observed
from .history import Line, Reader, Writer
from .metrics import Meter
from .policy import Policy
from .real.job import engines, perform
from .real.probe import Costs, probe
from .real.rig import Rig
from .real.setup import Setup
from .replay import replay
from .sim.scenario import (
    Control,
    EngineCosts,
    MemoryCosts,
    Scenario,
    TrainerCosts,
    TransportCosts,
)
from .sim.world import World
from .verdict import Run, Verdict, judge

SCALES = {"step": "engine", "train": "trainer", "sync": "transport", "memory": "memory", "control": "control"}
"""Costs that can be scaled on purpose, and the scenario's table of each."""


def scenario(costs: Costs, setup: Setup, rig: Rig) -> Scenario:
    """The fitted costs as a scenario of the same job."""
    able = rig.engines[0].capabilities
    old, ref, update = (costs.phases.get(name, (0.0, 0.0)) for name in ("old_logprob", "ref", "update"))
    gb = rig.trainer.parameter_bytes / 1e9
    return Scenario(
        shape=setup.shape,
        workload=setup.workload,
        engine=EngineCosts(
            step_s=costs.step,
            seq_s=costs.seq,
            kv_s=costs.kv,
            prompt_s=costs.prompt,
            kv_blocks=able.kv_tokens // able.page_size,
            block_size=able.page_size,
            max_num_seqs=able.max_requests,
            max_batch_tokens=able.max_batch_tokens,
        ),
        trainer=TrainerCosts(
            old_logprob_s=old[0],
            old_logprob_token_s=old[1],
            ref_s=ref[0],
            ref_token_s=ref[1],
            update_s=update[0] / setup.trainer.minibatches,
            update_token_s=update[1],
            optimizer_steps=setup.trainer.minibatches,
            parameters_gb=gb,
            optimizer_gb=2 * gb,
        ),
        transport=TransportCosts(
            version_gb=gb,
            ipc_begin_s=costs.begin["ipc"],
            ipc_bucket_s=costs.bucket["ipc"],
            ipc_gbps=1e9,
            broadcast_begin_s=costs.begin["broadcast"],
            broadcast_bucket_s=costs.bucket["broadcast"],
            broadcast_gbps=1e9,
            disk_begin_s=costs.begin["disk"],
            disk_bucket_s=costs.bucket["disk"],
            disk_gbps=1e9,
        ),
        memory=MemoryCosts(
            kv_gb=rig.engine_bytes(0)["kv"] / 1e9,
            offload_gbps=1e9,
            shift_s=costs.shift,
            sleep_s=costs.sleep,
            wake_weights_s=costs.wake_weights,
            wake_kv_s=costs.wake_kv,
        ),
        control=Control(
            latency_s=0.0,  # the probes measured round trips: the way to a child is in each of them
            submit_s=costs.submit,
            abort_s=costs.abort,
            pause_s=costs.pause,
            resume_s=costs.resume,
            flush_s=costs.flush,
        ),
    )


def scaled(base: Scenario, changes: Sequence[str]) -> Scenario:
    """``base`` with costs multiplied: ``train=2`` doubles every second of the trainer."""
    for change in changes:
        name, equals, text = change.partition("=")
        if not equals or name not in SCALES:
            raise InputError(f"--scale-cost {change!r}: write cost=factor; the costs are {', '.join(SCALES)}")
        try:
            factor = float(text)
        except ValueError:
            raise InputError(f"--scale-cost {change!r}: {text!r} is no number") from None
        if not factor > 0:
            raise InputError(f"--scale-cost {change!r}: the factor must be positive")
        table = getattr(base, SCALES[name])
        seconds = {f: getattr(table, f) * factor for f in table.__struct_fields__ if f.endswith("_s")}
        base = structs.replace(base, **{SCALES[name]: structs.replace(table, **seconds)})
    return base


def validate(
    policies: Sequence[Policy],
    setup: Setup,
    folder: Path,
    *,
    repeats: int,
    seed: int,
    scale: Sequence[str] = (),
    say: Callable[[str], None] = lambda _: None,
) -> Verdict:
    """Run, simulate, check, replay and compare; the histories go to ``folder``. A void verdict is repeated once."""
    counts = {engines(p, setup) for p in policies}
    if len(counts) != 1:
        raise InputError(f"the policies lay out {sorted(counts)} engines: set place.engines so that all need as many")
    scaled(Scenario(), scale)
    return asyncio.run(_validate(policies, setup, folder, repeats, seed, scale, say, counts.pop()))


async def _validate(
    policies: Sequence[Policy],
    setup: Setup,
    folder: Path,
    repeats: int,
    seed: int,
    scale: Sequence[str],
    say: Callable[[str], None],
    count: int,
) -> Verdict:
    say("starting engine and trainer")
    rig = await Rig.start(setup, count)
    try:
        say("probing components")
        world = scaled(scenario(await probe(rig), setup, rig), scale)
        for attempt in (1, 2):
            real: dict[str, list[Run]] = {p.name: [] for p in policies}
            for i in range(repeats):
                for n, p in enumerate(policies):
                    say(f"real run {i * len(policies) + n + 1} of {repeats * len(policies)}: {p.name}")
                    path = folder / f"real-{attempt}-{i + 1}-{slug(p.name)}.jsonl.zst"
                    real[p.name].append(await _real(rig, p, seed, path))
            say("simulating")
            sim = {p.name: _simulated(world, p, seed, folder / f"sim-{slug(p.name)}.jsonl.zst") for p in policies}
            verdict = judge(real, sim, setup.engine.pace is not None)
            if not verdict.void:
                break
            say(f"void, once more: {'; '.join(verdict.void)}" if attempt == 1 else "void again")
        return verdict
    finally:
        await rig.close()


def slug(name: str) -> str:
    """A policy's name as part of a file's."""
    return "".join(c if c.isalnum() or c in "-._" else "_" for c in name)


async def _real(rig: Rig, policy: Policy, seed: int, path: Path) -> Run:
    overruns: list[float] = [0.0]

    def watch(line: Line) -> None:
        if isinstance(line, Observed) and line.name.endswith("/overrun_share"):
            overruns.append(line.value)

    _, end = await perform(rig, policy, seed, path, watch)
    if not end.ok:
        raise WorldError(f"{policy.name}: {end.why} (history: {path})")
    return _examined(path, max(overruns))


def _simulated(world: Scenario, policy: Policy, seed: int, path: Path) -> Run:
    with Writer(path) as writer:
        run = World(world, policy, seed, writer.write)
        writer.begin(run.manifest)
        run.run()
    return _examined(path, 0.0)


def _examined(path: Path, overrun: float) -> Run:
    reader = Reader(path)
    meter = Meter(reader.manifest.devices)
    for event in reader.events():
        meter.feed(event)
    return Run(str(path), meter.result(), check(Reader(path)), replay(Reader(path)), overrun)
