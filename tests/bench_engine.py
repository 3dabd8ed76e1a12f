"""How fast the simulated engine finishes requests: 256 running, lognormal lengths of mean 2000, ample KV.

Run ``python tests/bench_engine.py [requests]``. It prints a rate a line and then one JSON line. ``drained`` submits
waves of 256 with no queue behind them; ``backlogged`` keeps the queue full, so that a step that admits follows
each finish; ``replaced`` submits one request a nanosecond after each finish, which cuts a stretch besides.
"""

import json
import math
import random
import sys
from time import perf_counter

from rlsched.sim.batching import Limits
from rlsched.sim.costs import StepCosts
from rlsched.sim.engine import Engine, Finished, Request

SEATS = 256
MEAN, SIGMA = 2000, 0.8
PROMPT = 512
LIMITS = Limits(num_blocks=10**6, max_num_seqs=SEATS, max_batch_tokens=8192)
COSTS = StepCosts.from_seconds(step=8e-3, seq=20e-6, kv=4e-9, prompt=15e-6)


def lengths(count: int) -> list[int]:
    """Lognormal lengths of mean MEAN."""
    draw = random.Random(0)
    mu = math.log(MEAN) - SIGMA * SIGMA / 2
    return [max(1, round(draw.lognormvariate(mu, SIGMA))) for _ in range(count)]


def run(requests: list[Request], wave: int, replace: bool = False) -> dict[str, float]:
    """Submits ``wave`` requests whenever the engine stands still, and one after each finish if told to replace."""
    engine = Engine(LIMITS, COSTS)
    now = finished = boundaries = submitted = 0
    began = perf_counter()
    while finished < len(requests):
        for request in requests[submitted : submitted + wave]:
            engine.submit(now, request)
        submitted += wave
        while engine.next_t is not None:
            now = engine.next_t
            done = sum(type(outcome) is Finished for outcome in engine.boundary(now))
            finished += done
            boundaries += 1
            if replace and done:
                for request in requests[submitted : submitted + done]:
                    engine.submit(now + 1000, request)
                submitted += done
    seconds = perf_counter() - began
    return {
        "finished_per_s": round(finished / seconds),
        "boundaries_per_finish": round(boundaries / finished, 2),
        "simulated_s_per_s": round(now / 1e12 / seconds),
    }


def main(count: int = 100_000) -> None:
    """Measures both regimes and prints them."""
    requests = [Request(i, PROMPT, length) for i, length in enumerate(lengths(count))]
    results = {
        "drained": run(requests, wave=SEATS),
        "backlogged": run(requests, wave=count),
        "replaced": run(requests, wave=SEATS, replace=True),
    }
    for name, result in results.items():
        print(f"{name}: {result['finished_per_s']:,} finished requests/s")
    print(json.dumps({"requests": count, "seats": SEATS, **results}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
