"""Speed of whole simulated runs, history written, and of the checker; printed, never asserted.

    python tests/bench.py            everything, some minutes
    python tests/bench.py --quick    without the memory of long runs

The last line is one JSON object. Ratios to the bare SimPy loop are of this run: machines are shared and noisy.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import simpy

from rlsched.checker import check
from rlsched.history import Reader, Writer
from rlsched.naming import parse
from rlsched.shape import Shape
from rlsched.sim.scenario import EngineCosts, Scenario
from rlsched.sim.world import World
from rlsched.workload import Length, Workload

AMPLE = 1 << 20


def scenario(steps: int, engines: int = 64, samples: int = 16, blocks: int = AMPLE) -> Scenario:
    """512 groups a batch, lognormal lengths of mean 2,000 capped at 8,192, 256 sequences an engine."""
    return Scenario(
        shape=Shape(b=512, samples=samples, engines=engines, budget=8192, steps=steps),
        workload=Workload(prompt=Length(mean=256), output=Length(kind="lognormal", mean=2000, sigma=0.8, most=8192)),
        engine=EngineCosts(kv_blocks=blocks, max_num_seqs=256),
    )


def rollouts_per_s(policy: str, world: Scenario, folder: Path) -> tuple[float, int]:
    """Trained rollouts a second of wall clock, and preemptions."""
    path = folder / "bench.jsonl"
    with Writer(path) as writer:
        run = World(world, parse(policy), 1, writer.write)
        writer.begin(run.manifest)
        began = time.perf_counter()
        end = run.run()
    seconds = time.perf_counter() - began
    assert end.ok, end
    shape = world.shape
    preemptions = sum(server.preemptions for server in run.servers.values())
    return shape.steps * shape.B * shape.samples / seconds, preemptions


def simpy_timeouts_per_s(n: int = 300_000) -> float:
    """A process that waits n times: what an event costs in SimPy itself."""
    env = simpy.Environment()

    def loop():
        for _ in range(n):
            yield env.timeout(1)

    env.process(loop())
    began = time.perf_counter()
    env.run()
    return n / (time.perf_counter() - began)


def peak_mb(steps: int) -> float:
    """Peak resident memory of a run of so many steps, in a process of its own."""
    told = subprocess.run(
        [sys.executable, __file__, "--memory", str(steps)], check=True, capture_output=True, text=True
    )
    return float(told.stdout)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--memory", type=int)
    options = parser.parse_args()
    main_policy = "areal-async,admit.eta=1,admit.C=1024"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.memory:
            rollouts_per_s(main_policy, scenario(options.memory), folder)
            # Not `ru_maxrss`, which a process has from the one that started it.
            (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
            print(int(peak) / 1024)
            return
        bare = median(simpy_timeouts_per_s() for _ in range(3))
        rates = [rollouts_per_s(main_policy, scenario(12), folder)[0] for _ in range(5)]
        began = time.perf_counter()
        report = check(Reader(folder / "bench.jsonl"))
        checked = report.events / (time.perf_counter() - began)
        assert report.ok, report.violations[:1]
        print(f"bare SimPy timeout loop    {bare:12,.0f} timeouts/s")
        print(f"η=1, 64 engines, n=16      {median(rates):12,.0f} rollouts/s   {median(rates) / bare:.3f} of the loop")
        others = {
            "η=4, C=2560": ("areal-async,admit.eta=4,admit.C=2560", scenario(8)),
            "n=1": (main_policy, scenario(60, samples=1)),
            "16 engines": (main_policy, scenario(8, engines=16)),
            "about 1 % preempted": (main_policy, scenario(8, blocks=16_800)),
        }
        for label, (policy, world) in others.items():
            rate, preempted = rollouts_per_s(policy, world, folder)
            share = preempted / (world.shape.steps * world.shape.B * world.shape.samples)
            print(f"{label:26} {rate:12,.0f} rollouts/s   {rate / bare:.3f} of the loop, {share:.1%} preempted")
        print(f"checker                    {checked:12,.0f} events/s")
        result = {
            "rollouts_per_s": round(median(rates)),
            "checked_events_per_s": round(checked),
            "simpy_timeouts_per_s": round(bare),
        }
        if not options.quick:
            short, long = peak_mb(40), peak_mb(400)
            print(f"peak memory, 40 steps      {short:12,.1f} MB")
            print(f"peak memory, 400 steps     {long:12,.1f} MB   {long / short:.2f} times")
            result["peak_rss_mb"] = round(long, 1)
        print(json.dumps(result))


if __name__ == "__main__":
    main()
