"""The test kit: random worlds for a policy of your own, and what to demand of the histories.

    from hypothesis import given
    from hypothesis import strategies as st
    from rlsched.testing import assert_clean, policies, run, scenarios, seeds

    @given(scenarios(), policies(select=st.just(Freshest())), seeds())
    def test_freshest(scenario, policy, seed):
        assert_clean(run(scenario, policy, seed))

The strategies draw small worlds, a few hundred events long, that are rich in trouble: ties, queues,
preemption, interruption, rejected groups. ``batches`` says what was trained on, recounted from the
events alone. Needs the extra ``test``.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import Struct
from rlsched.sim.scenario import Control, EngineCosts, MemoryCosts, Scenario, TrainerCosts, TransportCosts
from rlsched.sim.world import World

from .checker import Checker, Report
from .commands import Abort, Train
from .controller import Controller
from .facts import End, Segment
from .history import Event, Line
from .manifest import Manifest
from .notes import Accept, Admit, Cancel, Drop, Reject
from .policy import Policy
from .replay import Replay, compare
from .shape import Shape
from .slots.admit import Barrier, Cap
from .slots.expire import AgeBound, Never
from .slots.place import Colocated, Disaggregated
from .slots.publish import EveryVersion
from .slots.route import LeastLoaded, RoundRobin
from .slots.select import FirstFinished, InOrder, OldestFinished
from .workload import Length, Workload

# ---- worlds to draw


@st.composite
def shapes(draw: st.DrawFn, **fixed: int) -> Shape:
    """A small shape. ``fixed`` fields aren't drawn."""
    drawn = {
        "b": draw(st.integers(1, 4)),
        "k": draw(st.integers(1, 3)),
        "samples": draw(st.integers(1, 3)),
        "steps": draw(st.integers(2, 5)),
        "engines": draw(st.integers(1, 3)),
        "budget": draw(st.integers(1, 48)),
    }
    return Shape(**{**drawn, **fixed})


@st.composite
def workloads(draw: st.DrawFn, fixed: bool | None = None, reject: float | None = None) -> Workload:
    """Lengths, reward latencies and filters. ``fixed``: whether all lengths are alike, so that ties abound."""
    if draw(st.booleans()) if fixed is None else fixed:
        prompt, output = Length(mean=draw(st.integers(1, 32))), Length(mean=draw(st.integers(1, 32)))
    else:
        shared = draw(st.sampled_from((0.5, 0.0, 1.0)))
        prompt = Length(kind="lognormal", mean=16.0, most=48)
        output = Length("lognormal", draw(st.integers(2, 32)), draw(st.sampled_from((0.6, 1.6))), shared)
    share = draw(st.sampled_from((0.0, 0.1, 0.4))) if reject is None else reject
    return Workload(prompt, output, reward_s=draw(st.sampled_from((0.0, 0.004, 0.08))), reject=share)


@st.composite
def scenarios(
    draw: st.DrawFn,
    shape: st.SearchStrategy[Shape] | None = None,
    workload: st.SearchStrategy[Workload] | None = None,
    even: bool | None = None,
) -> Scenario:
    """A world. ``even``: every duration is a multiple of a millisecond, so that much happens at one instant.

    KV memory, seats and token budgets are ample or so tight that requests queue and are preempted.
    """
    numbers = draw(shapes() if shape is None else shape)
    load = draw(workloads() if workload is None else workload)
    uneven = not draw(st.booleans()) if even is None else not even
    ms = 1e-3
    prompt, new = load.longest(numbers.budget)
    size = draw(st.sampled_from((16, 1, 4)))
    blocks = -(-(prompt + new) // size) + draw(st.sampled_from((4096, 0, 2)))
    seats = draw(st.sampled_from((256, 1, 3)))
    return Scenario(
        shape=numbers,
        workload=load,
        engine=EngineCosts(
            step_s=ms,
            seq_s=7e-6 if uneven else 0.0,
            kv_s=3e-7 if uneven else 0.0,
            prompt_s=2e-5 if uneven else 0.0,
            kv_blocks=blocks,
            block_size=size,
            max_num_seqs=seats,
            max_batch_tokens=draw(st.sampled_from((8192, seats, seats + 13))),
        ),
        trainer=TrainerCosts(
            old_logprob_s=draw(st.sampled_from((0.0, 2 * ms))),
            old_logprob_token_s=0.0,
            update_s=draw(st.sampled_from((0.0, 5 * ms, 40 * ms))),
            update_token_s=1e-5 if uneven else 0.0,
            optimizer_steps=draw(st.integers(1, 2)),
        ),
        transport=TransportCosts(
            version_gb=0.003,
            ipc_gbps=3.0,
            broadcast_bucket_s=draw(st.sampled_from((ms, 10 * ms))),
            broadcast_gbps=3.0 if uneven else 1e9,
        ),
        memory=MemoryCosts(device_gb=0.02, kv_gb=0.01, sleep_s=ms, wake_weights_s=ms, wake_kv_s=ms)
        if (tight := draw(st.booleans()))
        else MemoryCosts(sleep_s=ms, wake_weights_s=ms, wake_kv_s=ms),
        control=Control(
            latency_s=draw(st.sampled_from((ms, 0.0, 20 * ms))),
            abort_s=draw(st.sampled_from((0.0, ms))),
            pause_s=draw(st.sampled_from((0.0, 2 * ms))),
            flush_s=draw(st.sampled_from((0.0, ms))),
        ),
    )


@st.composite
def policies(draw: st.DrawFn, **slots: st.SearchStrategy[Any]) -> Policy:
    """A policy from rlsched's own slots. A slot that is given is drawn from there, and the others fit it.

    Colocated engines sleep until the version is out, so a selection that takes part of a version
    before the rest is finished would wait for ever: with ``select`` given, ``place`` is disaggregated.
    """
    ages = st.builds(AgeBound, st.integers(0, 2), st.booleans())
    apart = st.builds(Disaggregated, trainers=st.integers(1, 2))
    turns = st.sampled_from((None, ("optimizer", "parameters"), ("optimizer",), ()))
    admit = slots.get("admit", st.builds(Cap, st.integers(0, 3), st.none() | st.integers(1, 12)) | st.just(Barrier()))
    place = slots.get("place", apart if "select" in slots else apart | st.builds(_colocated, turns, st.sampled_from((2, 1))))
    where = draw(place)
    select = st.just(InOrder(whole=True)) if isinstance(where, Colocated) else _selects()
    return Policy(
        "drawn",
        admit=draw(admit),
        select=draw(slots.get("select", select)),
        expire=draw(slots.get("expire", st.just(Never()) | ages)),
        publish=draw(slots.get("publish", publishers())),
        place=where,
        route=draw(slots.get("route", st.sampled_from((RoundRobin(), LeastLoaded())))),
    )
