"""What running vLLM under rlsched costs: tokens a second of a scheduled run against the same requests sent straight.

    python tests/bench_vllm.py [--repeats 7]

Through rlsched: one version of a synchronous policy on a real rig, unpaced, its history written; from its first command
to generate to the last segment. Straight: the very requests of that run, with the same engine arguments, sent to an
`AsyncLLM` in a process of its own, which hands out final outputs only. The two take turns, so that a machine that
others use disturbs both, and CPU time is told, too: on a busy machine it says more than the clock. Printed, never
asserted; the last line is one JSON object.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from rlsched.real.config import EngineConfig
from rlsched.real.engines.family import Family
from rlsched.real.installs import RECIPES, EngineKind, require

CONFIG = EngineConfig(kv_blocks=2048, max_requests=64)
"""Room for all requests at once."""
KINDS: tuple[EngineKind, ...] = ("vllm", "vllm-async", "vllm-server")


class Rate(NamedTuple):
    """How fast it went."""

    tokens_per_s: float
    cpu_us_per_token: float


class Meter:
    """Time and CPU time between two moments, of a process with all below it and, if that is another, of this one."""

    def __init__(self, pid: int) -> None:
        self._family = Family(Pid(pid))
        self._own = 0 if pid == os.getpid() else 1
        self._began = self._now()
        self._ended = self._began

    def _now(self) -> tuple[int, int]:
        return time.perf_counter_ns(), self._family.cpu_ns() + self._own * time.process_time_ns()

    def mark(self) -> None:
        """Until now."""
        self._ended = self._now()

    def rate(self, tokens: int) -> Rate:
        """Of so many tokens."""
        took, cpu = (b - a for a, b in zip(self._began, self._ended, strict=True))
        return Rate(tokens / took * 1e9, cpu / tokens / 1e3)


class Pid:
    """A process that somebody else waits for."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def wait(self) -> int:
        """Not here."""
        raise NotImplementedError


async def through(rig: Any, history: Path) -> tuple[Rate, list[tuple[list[int], int]]]:
    """One run on a rig, while it generated; and its requests."""
    from rlsched.commands import Generate
    from rlsched.facts import Segment
    from rlsched.naming import parse
    from rlsched.real.job import perform

    meter: Meter | None = None
    sent: list[tuple[list[int], int]] = []
    tokens = 0
    client = rig.engines[0]
    submit = type(client).submit

    async def noting(rollout: str, given: list[int], length: int, *, forced: bool = True) -> None:
        sent.append((given, length))
        await submit(client, rollout, given, length, forced=forced)

    def watch(line: object) -> None:
        nonlocal tokens, meter
        if isinstance(line, Generate) and meter is None:
            meter = Meter(client.child.pid)
        if isinstance(line, Segment) and meter is not None:
            tokens += line.n
            meter.mark()

    client.submit = noting
    try:
        _, end = await perform(rig, parse("verl-hybrid"), 0, history, watch)
    finally:
        del client.submit
    assert end.ok, end.why
    assert meter is not None
    return meter.rate(tokens), sent


class Straight:
    """vLLM in a process of its own, without rlsched."""

    def __init__(self) -> None:
        # Its sockets in the abstract namespace: nothing is left behind, whatever ends it.
        environment = {**RECIPES["vllm-async"].environment, "VLLM_RPC_BASE_PATH": f"@rlsched-bench-{os.getpid()}"}
        command = [require("vllm-async").interpreter, __file__, "--straight"]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**environment, "HF_HUB_OFFLINE": "1", "PATH": "/usr/bin:/bin", "HOME": tempfile.gettempdir()},
            text=True,
        )

    def generate(self, requests: list[tuple[list[int], int]], logprobs: bool) -> Rate:
        """Generate these."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([requests, logprobs]) + "\n")
        self.process.stdin.flush()
        while line := self.process.stdout.readline():
            if line.startswith("rate "):
                return Rate(*map(float, line.split()[1:]))
        raise RuntimeError(f"vLLM ended: exit code {self.process.wait()}")

    def close(self) -> None:
        """End it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


async def straight() -> None:
    """Be that process: requests come line by line on stdin."""
    from vllm import SamplingParams
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from rlsched.real.engines.vllm_arguments import arguments, sampling
    from rlsched.real.model import save

    with tempfile.TemporaryDirectory() as folder:
        save(CONFIG.model, Path(folder))
        vllm = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments(CONFIG, folder)))
    sent = 0

    async def one(tokens: list[int], length: int, logprobs: bool) -> int:
        nonlocal sent
        sent += 1
        wanted = SamplingParams(
            **{**sampling(CONFIG, length, True), "logprobs": 0 if logprobs else None},
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        (output,) = [o async for o in vllm.generate({"prompt_token_ids": tokens}, wanted, f"r{sent}")]
        return len(output.outputs[0].token_ids)

    while line := await asyncio.to_thread(sys.stdin.readline):
        requests, logprobs = json.loads(line)
        await vllm.reset_prefix_cache()
        meter = Meter(os.getpid())
        made = sum(await asyncio.gather(*(one(tokens, length, logprobs) for tokens, length in requests)))
        meter.mark()
        print("rate", *meter.rate(made), flush=True)
    vllm.shutdown()


async def compare(kind: EngineKind, repeats: int, other: Straight) -> dict[str, Any]:
    """One kind of engine in turn with vLLM itself."""
    from rlsched.real.rig import Rig
    from rlsched.real.setup import Setup
    from rlsched.shape import Shape
    from rlsched.workload import Length, Workload

    setup = Setup(
        engine_kind=kind,
        engine=CONFIG,
        shape=Shape(b=16, samples=4, steps=1, budget=400),
        workload=Workload(prompt=Length(mean=4.0), output=Length(kind="lognormal", mean=200.0, sigma=0.5)),
    )
    ours: list[Rate] = []
    theirs: list[Rate] = []
    bare: list[Rate] = []
    with tempfile.TemporaryDirectory() as folder:
        rig = await Rig.start(setup, 1)
        try:
            for i in range(repeats + 1):
                rate, sent = await through(rig, Path(folder) / f"{i}.jsonl")
                rates = rate, *(other.generate(sent, logprobs) for logprobs in (True, False))
                print(f"{kind} {i}: {' '.join(f'{r.tokens_per_s:.0f}' for r in rates)}", file=sys.stderr, flush=True)
                if i:  # the first ones warm up
                    for found, each in zip((ours, theirs, bare), rates, strict=True):
                        found.append(each)
        finally:
            await rig.close()
    middle = {name: middles(rates) for name, rates in (("rlsched", ours), ("straight", theirs), ("bare", bare))}
    return {
        "kind": kind,
        "requests": len(sent),
        "tokens": sum(length for _, length in sent),
        **middle,
        "ratio": middle["rlsched"].tokens_per_s / middle["straight"].tokens_per_s,
        "runs": {"rlsched": ours, "straight": theirs, "bare": bare},
    }


def middles(rates: list[Rate]) -> Rate:
    """Medians."""
    return Rate(median(r.tokens_per_s for r in rates), median(r.cpu_us_per_token for r in rates))


async def main(repeats: int, kinds: list[EngineKind]) -> None:
    """Compare all kinds."""
    other = Straight()
    try:
        found = [await compare(kind, repeats, other) for kind in kinds]
    finally:
        other.close()
    for each in found:
        print(f"{each['kind']}: {each['requests']} requests, {each['tokens']} tokens, ratio {each['ratio']:.3f}")
        for name, what in (("rlsched", ""), ("straight", ""), ("bare", ": straight, without logprobs")):
            rate = each[name]
            print(
                f"  {name:9}{rate.tokens_per_s:7,.0f} tokens/s, {rate.cpu_us_per_token:5,.0f} us of CPU a token{what}"
            )
    print(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--straight", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    asyncio.run(straight() if chosen.straight else main(chosen.repeats, chosen.kinds))
