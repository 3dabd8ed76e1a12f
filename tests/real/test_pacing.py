"""Pacing, on a clock of its own: no test here waits."""

from __future__ import annotations

import pytest

from rlsched.real.pacing import Pacer, StepCost, WorkCost

pytestmark = pytest.mark.real


class Time:
    """A clock that moves when one works, sleeps, or sleeps too long."""

    def __init__(self, overshoot: int = 0) -> None:
        self.now = 1_000
        self.overshoot = overshoot
        self.slept: list[int] = []

    def clock(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        duration = round(seconds * 1e9)
        self.slept.append(duration)
        self.now += duration + (self.overshoot if duration else 0)

    def pacer(self) -> Pacer:
        return Pacer(self.clock, self.sleep)


def unit(time: Time, pacer: Pacer, work: int, cost: int) -> None:
    pacer.start()
    time.now += work
    pacer.hold(cost)


def test_costs_are_sums():
    assert StepCost(a=1000, b=100, c=10, p=1).of(decoding=2, kv_tokens=3, prompt_tokens=4) == 1234
    assert WorkCost(fixed=5, each=2).of(10) == 25


def test_work_is_held_to_its_minimum():
    time = Time()
    pacer = time.pacer()
    unit(time, pacer, work=30, cost=100)
    assert time.now == 1_100
    assert time.slept == [70]
    assert (pacer.held, pacer.declared_ns, pacer.overruns, pacer.overrun_ns) == (1, 100, 0, 0)


def test_what_sleeping_overshoots_is_not_lost():
    time = Time(overshoot=9)
    pacer = time.pacer()
    for _ in range(100):
        unit(time, pacer, work=30, cost=100)
    # Unchained, every unit would add its overshoot: 900.
    assert time.now - 1_000 == 100 * 100 + 9
    assert pacer.overruns == 0


def test_an_overrun_is_counted_once_and_made_good():
    time = Time()
    pacer = time.pacer()
    unit(time, pacer, work=140, cost=100)
    assert (pacer.overruns, pacer.overrun_ns) == (1, 40)
    unit(time, pacer, work=80, cost=100)  # on time by itself, still 20 late by the chain
    assert (pacer.overruns, pacer.overrun_ns) == (1, 40)
    unit(time, pacer, work=50, cost=100)
    assert time.now == 1_300
    unit(time, pacer, work=105, cost=100)
    assert (pacer.overruns, pacer.overrun_ns) == (2, 45)


def test_growing_lateness_counts_what_it_grew_by():
    time = Time()
    pacer = time.pacer()
    for _ in range(3):
        unit(time, pacer, work=110, cost=100)
    assert (pacer.overruns, pacer.overrun_ns) == (3, 30)


def test_after_a_long_stall_units_are_held_again():
    time = Time()
    pacer = time.pacer()
    unit(time, pacer, work=1_000, cost=100)
    assert (pacer.overruns, pacer.overrun_ns) == (1, 900)
    unit(time, pacer, work=10, cost=100)
    assert time.slept == [90]


def test_a_rest_ends_the_chain():
    time = Time()
    pacer = time.pacer()
    unit(time, pacer, work=10, cost=100)
    pacer.rest()
    assert not pacer.chained
    time.now += 5_000
    unit(time, pacer, work=10, cost=100)
    assert time.slept == [90, 90]
    assert pacer.overruns == 0


def test_hold_needs_a_start():
    with pytest.raises(RuntimeError, match="start"):
        Time().pacer().hold(1)
