"""The workload: keyed draws that no order changes, and the distributions that were asked for."""

from math import log
from random import Random
from statistics import correlation, mean, stdev
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsched.commands import Generate, Train
from rlsched.errors import InputError
from rlsched.facts import Scored, Segment, Trained
from rlsched.keyed import bits, normal, uniform
from rlsched.policy import Policy, areal_async, replace, verl_hybrid
from rlsched.sim.scenario import load
from rlsched.sim.world import World
from rlsched.slots.admit import Cap
from rlsched.workload import Length, Workload

MANY = 4000
NO_BUDGET = 1 << 40

seeds = st.integers(0, 2**32)
ids = st.integers(0, 10**6)


def lognormal(sample: int = 0, seed: int = 1, **length: Any) -> list[int]:
    """Lengths of one sample of many prompts."""
    load = Workload(output=Length("lognormal", **length))
    return [load.output_tokens(seed, prompt, sample, 0, NO_BUDGET) for prompt in range(MANY)]


# ---- keyed draws


def test_draws_do_not_depend_on_the_order_in_which_they_are_made() -> None:
    load = Workload(prompt=Length("lognormal", 64.0, most=512), reject=0.3)
    keys = [(p, s, a) for p in range(20) for s in range(4) for a in range(2)]

    def draw(order: list[tuple[int, int, int]]) -> dict[Any, Any]:
        return {
            (p, s, a): (load.prompt_tokens(3, p), load.output_tokens(3, p, s, a, 999), load.kept(3, p, a))
            for p, s, a in order
        }

    shuffled = [*keys]
    Random(0).shuffle(shuffled)
    assert draw(keys) == draw(shuffled)


@given(seeds, ids, ids)
def test_every_part_of_a_key_counts(seed: int, a: int, b: int) -> None:
    assert bits(seed, "x", a, b) != bits(seed, "y", a, b)
    assert bits(seed, "x", a, b) != bits(seed + 1, "x", a, b)
    assert bits(seed, "x", a, b) != bits(seed, "x", a, b + 1)
    assert bits(seed, "x", a, b) != bits(seed, "x", f"{a}{b}")
    assert 0 < uniform(seed, "x", a, b) < 1


def test_keyed_numbers_are_the_same_on_every_machine() -> None:
    assert bits(7, "sample", 3, 1) == 0xD5BD278CB0A4A276


def test_keyed_numbers_are_uniform_and_normal() -> None:
    flat = [uniform(1, "u", i) for i in range(MANY)]
    assert mean(flat) == pytest.approx(0.5, abs=4 * 0.2887 / MANY**0.5)
    tenths = [sum(int(10 * x) == i for x in flat) for i in range(10)]
    assert sum((n - MANY / 10) ** 2 / (MANY / 10) for n in tenths) < 27.9, "chi-square, 9 degrees, 0.1 %"
    bell = [normal(1, "n", i) for i in range(MANY)]
    assert mean(bell) == pytest.approx(0, abs=4 / MANY**0.5)
    assert stdev(bell) == pytest.approx(1, abs=4 / (2 * MANY) ** 0.5)


# ---- distributions


def test_a_fixed_length_is_its_mean_within_the_budget() -> None:
    load = Workload(prompt=Length(mean=10.0), output=Length(mean=20.0))
    assert {load.prompt_tokens(0, p) for p in range(9)} == {10}
    assert {load.output_tokens(0, p, 0, 0, 99) for p in range(9)} == {20}
    assert {load.output_tokens(0, p, 0, 0, 5) for p in range(9)} == {5}


@pytest.mark.parametrize(("average", "sigma"), [(128.0, 0.6), (1000.0, 0.3), (500.0, 1.0)])
def test_a_lognormal_length_has_the_mean_and_spread_asked_for(average: float, sigma: float) -> None:
    tokens = lognormal(mean=average, sigma=sigma)
    assert mean(tokens) == pytest.approx(average, abs=4 * stdev(tokens) / MANY**0.5)
    logs = [log(n) for n in tokens]
    assert stdev(logs) == pytest.approx(sigma, abs=4 * sigma / (2 * MANY) ** 0.5 + 0.01)
    assert mean(logs) == pytest.approx(log(average) - sigma**2 / 2, abs=4 * sigma / MANY**0.5 + 0.01)


def test_no_sigma_is_a_fixed_length() -> None:
    assert {*lognormal(mean=77.0, sigma=0.0)} == {77}


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 0.9, 1.0])
def test_samples_of_a_prompt_are_correlated_as_asked(share: float) -> None:
    first, second = ([log(n) for n in lognormal(s, mean=2000.0, sigma=0.5, group=share)] for s in (0, 1))
    assert correlation(first, second) == pytest.approx(share, abs=4 * (1 - share**2) / MANY**0.5 + 0.01)
    if share == 1.0:
        assert first == second


def test_samples_of_different_prompts_and_attempts_are_not_correlated() -> None:
    load = Workload(output=Length("lognormal", 2000.0, group=1.0))
    draws = [[log(load.output_tokens(1, p, 0, attempt, NO_BUDGET)) for p in range(MANY)] for attempt in (0, 1)]
    assert correlation(*draws) == pytest.approx(0, abs=4 / MANY**0.5)
    assert correlation(draws[0][1:], draws[0][:-1]) == pytest.approx(0, abs=4 / MANY**0.5)


@given(seeds, ids, ids, st.integers(1, 500), st.integers(1, 500))
def test_lengths_stay_between_one_and_the_budget(seed: int, prompt: int, sample: int, budget: int, most: int) -> None:
    load = Workload(
        prompt=Length("lognormal", 100.0, 2.0, most=most), output=Length("lognormal", 100.0, 2.0, most=most)
    )
    assert 1 <= load.output_tokens(seed, prompt, sample, 0, budget) <= min(budget, most)
    assert 1 <= load.prompt_tokens(seed, prompt) <= most


def test_the_budget_is_reached_and_a_shorter_one_changes_no_other_length() -> None:
    load = Workload(output=Length("lognormal", 100.0, 1.0))
    free = [load.output_tokens(1, p, 0, 0, NO_BUDGET) for p in range(500)]
    clipped = [load.output_tokens(1, p, 0, 0, 100) for p in range(500)]
    assert clipped == [min(n, 100) for n in free]
    assert 100 in clipped and max(free) > 100 and min(clipped) < 100


@pytest.mark.parametrize("share", [0.0, 0.05, 0.5, 0.95])
def test_the_share_of_groups_that_is_rejected(share: float) -> None:
    load = Workload(reject=share)
    kept = sum(load.kept(1, prompt, attempt) for prompt in range(MANY // 2) for attempt in (0, 1))
    assert 1 - kept / MANY == pytest.approx(share, abs=4 * (share * (1 - share) / MANY) ** 0.5)


def test_a_rejected_prompt_may_be_kept_at_another_attempt() -> None:
    load = Workload(reject=0.5)
    assert {(load.kept(1, p, 0), load.kept(1, p, 1)) for p in range(50)} == {(a, b) for a in (0, 1) for b in (0, 1)}


def test_the_longest_prompt_and_output_that_are_promised() -> None:
    assert Workload().longest(256) == (64, 256)
    assert Workload(output=Length("lognormal", 50.0, most=100)).longest(256) == (64, 100)
    assert Workload(Length("lognormal", 50.0, most=90), Length("lognormal", 50.0, most=900)).longest(256) == (90, 256)
    assert Workload(output=Length(mean=20.0)).longest(256)[1] >= 20


# ---- refusals


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Length(mean=0.5), "mean length of 0.5"),
        (lambda: Length(sigma=-0.1), "sigma"),
        (lambda: Length(group=1.1), "group share"),
        (lambda: Length(group=-0.1), "group share"),
        (lambda: Length(most=0), "longest length of 0"),
        (lambda: Workload(prompt=Length("lognormal")), "workload.prompt.most"),
        (lambda: Workload(reward_s=-1.0), "workload.reward_s is -1.0"),
        (lambda: Workload(reject=1.0), "workload.reject is 1.0"),
        (lambda: Workload(reject=-0.1), "workload.reject is -0.1"),
    ],
)
def test_what_can_not_be_drawn_is_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        make()


# ---- common random numbers in whole runs


def drawn(policy: Policy, seed: int = 0) -> tuple[dict[tuple[int, int, int], int], dict[tuple[int, int], bool]]:
    """What a simulated run drew: tokens by prompt, sample and attempt; kept or not by prompt and attempt."""
    events: list[Any] = []
    changes = ["shape.b=2", "shape.samples=2", "shape.engines=2", "shape.budget=400", "shape.steps=4"]
    World(load(None, [*changes, "workload.reject=0.2"]), policy, seed, events.append).run()
    work: dict[int, tuple[int, int, int]] = {}
    tokens: dict[int, int] = {}
    lengths: dict[tuple[int, int, int], int] = {}
    kept: dict[tuple[int, int], bool] = {}
    for event in events:
        match event:
            case Generate():
                work |= {w.rollout: (w.prompt, w.sample, w.attempt) for w in event.work}
                tokens |= {w.rollout: w.have for w in event.work}
            case Segment():
                tokens[event.rollout] += event.n
                if event.end in ("stop", "length"):
                    lengths[work[event.rollout]] = tokens[event.rollout]
            case Scored():
                prompt, _, attempt = work[event.rollout]
                kept[prompt, attempt] = event.keep
    assert sum(isinstance(e, Trained) for e in events) == sum(isinstance(e, Train) for e in events) == 4
    return lengths, kept


def test_two_policies_see_the_same_lengths_and_filters() -> None:
    lengths, kept = drawn(verl_hybrid())
    others, theirs = drawn(replace(areal_async(), admit=Cap(eta=2)))
    common = {*lengths} & {*others}
    assert len(common) > 10
    assert {k: lengths[k] for k in common} == {k: others[k] for k in common}
    both = {*kept} & {*theirs}
    assert {k: kept[k] for k in both} == {k: theirs[k] for k in both}
    assert {*kept.values()} == {True, False}


def test_another_seed_is_another_world() -> None:
    lengths, _ = drawn(verl_hybrid())
    others, _ = drawn(verl_hybrid(), seed=1)
    common = {*lengths} & {*others}
    assert sum(lengths[k] != others[k] for k in common) > len(common) / 2
