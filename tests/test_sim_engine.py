"""The simulated engine: equal to its twin to the last event, and right where it can be worked out by hand."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlsched.sim.batching import Limits
from rlsched.sim.costs import StepCosts, step_time, steps_within, stretch_time
from rlsched.sim.engine import (
    Abort,
    Aborted,
    Acked,
    Engine,
    Finished,
    Outcome,
    Pause,
    Preempted,
    Request,
    Resume,
    Retract,
)
from rlsched.sim.kv import BlockPool, blocks_of

from .twin import Arrival, Event, Shares, Spec, Twin, ample_specs, scripts, tight_specs

# ---- driving the engine by a script of the twin's


def build(spec: Spec) -> Engine:
    return Engine(
        Limits(
            num_blocks=spec.num_blocks,
            block_size=spec.block_size,
            max_num_seqs=spec.max_num_seqs,
            max_batch_tokens=spec.max_batch_tokens,
        ),
        StepCosts(step=spec.step, seq=spec.seq, kv=spec.kv, prompt=spec.prompt),
    )


def event(t: int, outcome: Outcome) -> Event:
    match outcome:
        case Acked(control=control):
            return t, "acked", control, 0
        case Finished() | Aborted() | Preempted():
            return t, type(outcome).__name__.lower(), outcome.id, outcome.tokens


def arrive(engine: Engine, arrival: Arrival) -> None:
    t, kind, first, *rest = arrival
    if kind == "submit":
        prompt, prior, remaining = rest
        engine.submit(t, Request(first, prompt, remaining, prior))
    elif kind == "abort":
        engine.control(t, Abort(first, rest[0]))
    elif kind == "pause":
        engine.control(t, Pause(first))
    elif kind == "retract":
        engine.control(t, Retract(first))
    else:
        engine.control(t, Resume(first))


def drive(engine: Engine, script: list[Arrival]) -> list[Event]:
    """Plays a script as SimPy would: in order of time, the boundary last among the calls of one instant."""
    log: list[Event] = []

    def run_until(t: int | None) -> None:
        while engine.next_t is not None and (t is None or engine.next_t < t):
            now = engine.next_t
            log.extend(event(now, outcome) for outcome in engine.boundary(now))
            assert engine.used_blocks <= engine._batch.limits.num_blocks

    for arrival in script:
        run_until(arrival[0])
        arrive(engine, arrival)
    run_until(None)
    return log


def assert_equal_to_twin(spec: Spec, script: list[Arrival]) -> Twin:
    engine, twin = build(spec), Twin(spec)
    assert drive(engine, script) == twin.run(script)
    inside = twin.running + twin.waiting
    assert engine.running == tuple(job.id for job in twin.running)
    assert engine.waiting == len(twin.waiting)
    assert [engine.tokens(job.id) for job in inside] == [job.new for job in inside]
    assert [engine.kv_tokens(job.id) for job in inside] == [job.cached for job in inside]
    assert engine.used_blocks == sum(job.blocks for job in twin.running)
    assert engine.busy == twin.busy
    assert twin.peak <= spec.num_blocks
    for name in ("steps", "decode_tokens", "prompt_tokens", "prefills", "preemptions", "retractions"):
        assert getattr(engine.counters, name) == getattr(twin, name), name
    assert_conserved(engine, twin, script)
    return twin


def assert_conserved(engine: Engine, twin: Twin, script: list[Arrival]) -> None:
    """Tokens made are tokens reported or still inside, and every request ends at most once, a finished one in full."""
    ended = {name: tokens for _, kind, name, tokens in twin.log if kind in ("finished", "aborted")}
    assert len(ended) == sum(kind in ("finished", "aborted") for _, kind, _, _ in twin.log)
    submitted = {arrival[2]: arrival for arrival in script if arrival[1] == "submit"}
    inside = submitted.keys() - ended.keys()
    assert len(inside) == len(engine.running) + engine.waiting
    made = sum(ended.values()) + sum(engine.tokens(name) for name in inside)
    assert made == engine.counters.decode_tokens + engine.counters.prefills
    assert all(submitted[name][5] == tokens for _, kind, name, tokens in twin.log if kind == "finished")
    if not {"aborted", "preempted"} & {kind for _, kind, _, _ in twin.log} and not inside:
        assert engine.counters.prompt_tokens == sum(a[3] + a[4] for a in submitted.values())


# ---- the twin property


def test_engine_equals_its_twin_when_memory_is_tight() -> None:
    shares = Shares()

    @settings(deadline=None, max_examples=300)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        spec = data.draw(tight_specs())
        script = data.draw(scripts(spec, 20, st.integers(0, 12) | st.integers(0, 60)))
        shares.count(assert_equal_to_twin(spec, script))

    agree()
    # Agreement about examples in which nothing happens would prove nothing.
    assert shares.preempted >= 0.3 * shares.examples, shares
    assert shares.aborted_midstep >= 0.3 * shares.examples, shares
    assert shares.tied >= 0.15 * shares.examples, shares
    assert shares.full >= 0.3 * shares.examples, shares


def test_engine_equals_its_twin_over_long_stretches() -> None:
    shares, stretched = Shares(), 0

    @settings(deadline=None, max_examples=60)
    @given(st.data())
    def agree(data: st.DataObject) -> None:
        nonlocal stretched
        spec = data.draw(ample_specs())
        gaps = st.integers(0, 10).map(lambda n: n * spec.step) | st.integers(0, 200 * spec.step)
        twin = assert_equal_to_twin(spec, data.draw(scripts(spec, 400, gaps)))
        shares.count(twin)
        stretched += twin.steps > 10 * (len(twin.log) + twin.prefills)

    agree()
    assert stretched >= 0.2 * shares.examples, (stretched, shares)
    assert shares.aborted_midstep >= 0.3 * shares.examples, shares


# ---- costs


def costs(step: int = 10, seq: int = 1, kv: int = 1, prompt: int = 2) -> StepCosts:
    return StepCosts(step=step, seq=seq, kv=kv, prompt=prompt)


any_costs = st.builds(costs, *[st.integers(1, 10**10), *[st.integers(0, 10**7)] * 3])


@given(any_costs, st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 60))
def test_a_stretch_takes_as_long_as_its_steps(costs: StepCosts, decoding: int, kv_tokens: int, steps: int) -> None:
    times = [step_time(costs, decoding, kv_tokens + decoding * i) for i in range(steps)]
    sums = list(accumulate(times, initial=0))
    assert sums == [stretch_time(costs, decoding, kv_tokens, j) for j in range(steps + 1)]


@given(any_costs, st.integers(0, 300), st.integers(0, 10**6), st.integers(0, 10**18))
def test_the_inverse_is_exact(costs: StepCosts, decoding: int, kv_tokens: int, duration: int) -> None:
    steps = steps_within(costs, decoding, kv_tokens, duration)
    assert steps >= 0
    assert stretch_time(costs, decoding, kv_tokens, steps) <= duration
    assert stretch_time(costs, decoding, kv_tokens, steps + 1) > duration


@given(any_costs, st.integers(0, 300), st.integers(0, 10**6), st.integers(1, 10**5))
def test_the_inverse_is_exact_at_step_ends(costs: StepCosts, decoding: int, kv_tokens: int, steps: int) -> None:
    end = stretch_time(costs, decoding, kv_tokens, steps)
    assert steps_within(costs, decoding, kv_tokens, end) == steps
    assert steps_within(costs, decoding, kv_tokens, end - 1) == steps - 1


def test_costs_from_seconds() -> None:
    made = StepCosts.from_seconds(step=8e-3, seq=2e-5, kv=4e-9, prompt=1.5e-5)
    assert made == costs(8_000_000_000, 20_000_000, 4_000, 15_000_000)
    with pytest.raises(ValueError, match="at least 1 ps"):
        StepCosts.from_seconds(step=1e-13)
    with pytest.raises(ValueError, match="'kv' is -1 ps"):
        costs(kv=-1)


# ---- blocks


@settings(deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.data())
def test_the_pool_counts_like_a_list(block_size: int, spare: int, data: st.DataObject) -> None:
    held: list[int] = []

    def used(steps: int = 0) -> int:
        return sum(blocks_of(tokens + steps, block_size) for tokens in held)

    pool = BlockPool(block_size, 0)
    for _ in range(data.draw(st.integers(1, 12))):
        match data.draw(st.sampled_from(["enter", "leave", "advance"])):
            case "enter":
                held.append(data.draw(st.integers(1, 12)))
                pool.enter(held[-1])
            case "leave" if held:
                pool.leave(held.pop(data.draw(st.integers(0, len(held) - 1))))
            case "advance":
                steps = data.draw(st.integers(0, 12))
                held = [tokens + steps for tokens in held]
                pool.advance(steps)
        assert (pool.used, pool.growth, pool.growing) == (used(), used(1) - used(), len(held))
        assert pool.tokens == sum(held)
        pool.num_blocks = used() + spare
        for limit in (1, 3, 50):
            assert pool.horizon(limit) == max(j for j in range(limit + 1) if used(j) <= pool.num_blocks)
        assert [pool.fits(n) for n in range(45)] == [used(1) + n <= pool.num_blocks for n in range(45)]


# ---- worked by hand


def spec(
    num_blocks: int = 100,
    block_size: int = 1,
    seats: int = 4,
    budget: int = 100,
    step: int = 10,
    seq: int = 0,
    kv: int = 0,
    prompt: int = 0,
) -> Spec:
    return Spec(num_blocks, block_size, seats, budget, step, seq, kv, prompt)


def test_one_request() -> None:
    # The prefill of 3 tokens takes 10 + 2·3 and samples the first token; then 10 + 1 + 3 and 10 + 1 + 4.
    engine = build(spec(seq=1, kv=1, prompt=2))
    assert drive(engine, [(5, "submit", 7, 3, 0, 3)]) == [(5 + 16 + 14 + 15, "finished", 7, 3)]
    assert engine.next_t is None
    assert (engine.busy, engine.counters.steps, engine.counters.decode_tokens) == (45, 3, 2)
    assert (engine.counters.prompt_tokens, engine.counters.prefills) == (3, 1)


def test_a_long_prompt_is_chunked_and_reads_its_own_kv() -> None:
    # Chunks of 4, 4 and 2 over 0, 4 and 8 tokens in KV.
    log = drive(build(spec(seats=2, budget=4, kv=1, prompt=1)), [(0, "submit", 0, 10, 0, 1)])
    assert log == [(14 + 18 + 20, "finished", 0, 1)]


def test_decodes_take_their_share_of_the_budget_first() -> None:
    # Request 1 gets 4 − 1 tokens a step beside the decoding request 0: its prompt of 6 takes two steps, from 10 to 30.
    script = [(0, "submit", 0, 4, 0, 9), (5, "submit", 1, 6, 0, 1)]
    assert drive(build(spec(seats=2, budget=4)), script)[0] == (30, "finished", 1, 1)


def test_prior_tokens_are_prefilled_and_not_counted_as_new() -> None:
    engine = build(spec(prompt=1))
    assert drive(engine, [(0, "submit", 0, 3, 4, 2)]) == [(17 + 10, "finished", 0, 2)]
    assert engine.counters.prompt_tokens == 7


def test_the_newest_is_preempted_and_recomputed() -> None:
    # Two tokens each fill the four blocks at 20. Request 0 takes those of request 1, which comes back at 40 with
    # one prompt and two new tokens to prefill, and samples its third in that step.
    engine = build(spec(num_blocks=4))
    script = [(0, "submit", 0, 1, 0, 4), (0, "submit", 1, 1, 0, 3)]
    assert drive(engine, script) == [(20, "preempted", 1, 2), (40, "finished", 0, 4), (50, "finished", 1, 3)]
    assert (engine.counters.preemptions, engine.counters.prompt_tokens) == (1, 1 + 1 + 3)


def test_the_preempted_goes_before_those_who_wait() -> None:
    script = [(0, "submit", 0, 1, 0, 4), (0, "submit", 1, 1, 0, 3), (5, "submit", 2, 3, 0, 1)]
    finished = [name for _, kind, name, _ in drive(build(spec(num_blocks=4)), script) if kind == "finished"]
    assert finished == [0, 1, 2]


@pytest.mark.parametrize(("arrival", "effect", "tokens"), [(29, 30, 3), (30, 30, 3), (31, 40, 4)])
def test_a_step_that_has_begun_completes_before_an_abort_acts(arrival: int, effect: int, tokens: int) -> None:
    script = [(0, "submit", 0, 1, 0, 9), (arrival, "abort", 77, None)]
    assert drive(build(spec()), script) == [(effect, "aborted", 0, tokens), (effect, "acked", 77, 0)]


@pytest.mark.parametrize("arrival", [41, 50])
def test_a_request_that_finishes_in_the_completing_step_is_finished(arrival: int) -> None:
    script = [(0, "submit", 0, 1, 0, 5), (arrival, "abort", 77, (0,))]
    assert drive(build(spec()), script) == [(50, "finished", 0, 5), (50, "acked", 77, 0)]


def test_an_abort_spares_what_is_submitted_after_it() -> None:
    script = [
        (0, "submit", 0, 1, 0, 5),
        (1, "submit", 1, 1, 0, 5),
        (2, "abort", 77, None),
        (3, "abort", 78, (2, 2, 5)),
        (4, "submit", 2, 1, 0, 1),
    ]
    assert drive(build(spec()), script) == [
        (10, "aborted", 0, 1),
        (10, "aborted", 1, 0),
        (10, "acked", 77, 0),
        (10, "acked", 78, 0),
        (20, "finished", 2, 1),
    ]


def test_a_pause_keeps_kv_and_the_rest_goes_on() -> None:
    engine = build(spec(prompt=1))
    script = [(0, "submit", 0, 5, 0, 3), (12, "pause", 1), (100, "resume", 2)]
    assert drive(engine, script) == [(15, "acked", 1, 0), (100, "acked", 2, 0), (120, "finished", 0, 3)]
    assert (engine.busy, engine.counters.prompt_tokens) == (35, 5)


def test_a_retraction_drops_kv_and_keeps_order() -> None:
    # At 20 ps each has one token of prompt and two new ones; both are prefilled again in the step from 100.
    engine = build(spec(prompt=1))
    script = [
        *[(0, "submit", i, 1, 0, 3) for i in range(2)],
        (15, "submit", 2, 1, 0, 1),
        (15, "pause", 1),
        (60, "retract", 3),
        (100, "resume", 2),
    ]
    log = drive(engine, script)
    assert log[:4] == [(22, "acked", 1, 0), (60, "preempted", 1, 2), (60, "preempted", 0, 2), (60, "acked", 3, 0)]
    assert log[4:] == [
        (100, "acked", 2, 0),
        *[(100 + 10 + 3 + 3 + 1, "finished", i, n) for i, n in [(0, 3), (1, 3), (2, 1)]],
    ]
    assert (engine.counters.retractions, engine.counters.preemptions) == (2, 0)


# ---- looking in, and what is refused


def test_a_paused_engine_can_be_looked_into() -> None:
    engine = build(spec(block_size=4, seats=1))
    engine.submit(0, Request(0, prompt=6, remaining=9))
    engine.boundary(0)
    engine.boundary(10)
    engine.submit(23, Request(1, prompt=5, remaining=1))
    engine.control(25, Pause(1))
    with pytest.raises(ValueError, match="1 running requests stand on the KV"):
        engine.drop_kv()
    assert engine.next_t == 30
    assert engine.boundary(30) == [Acked(1)]
    # Three steps made three tokens, of which the last has no KV yet.
    assert (engine.tokens(0), engine.kv_tokens(0), engine.used_blocks) == (3, 8, 2)
    assert (engine.tokens(1), engine.kv_tokens(1)) == (0, 0)
    assert (engine.running, engine.waiting, engine.paused) == ((0,), 1, True)
    engine.submit(40, Request(2, prompt=1, remaining=1))
    assert engine.next_t is None
    assert engine.waiting == 2
    engine.control(50, Abort(2))
    assert engine.boundary(50) == [Aborted(0, 3), Aborted(1, 0), Aborted(2, 0), Acked(2)]
    engine.drop_kv()
    with pytest.raises(KeyError):
        engine.tokens(0)


def test_only_an_arrival_that_can_act_cuts_a_stretch() -> None:
    engine = build(spec(seats=2))
    engine.submit(0, Request(0, prompt=1, remaining=50))
    engine.boundary(0)
    engine.boundary(10)
    assert engine.next_t == 500
    engine.submit(15, Request(1, prompt=1, remaining=50))
    assert engine.next_t == 20
    engine.boundary(20)
    engine.boundary(30)
    assert engine.next_t == 500
    engine.submit(35, Request(2, prompt=1, remaining=1))  # no seat
    assert engine.next_t == 500


def test_requests_that_can_never_fit_are_refused() -> None:
    engine = build(spec(num_blocks=3, block_size=4))
    with pytest.raises(ValueError, match=r"KV for 13 tokens, 4 blocks of 4; the engine has 3"):
        engine.submit(0, Request(0, prompt=5, prior=2, remaining=7))
    assert (engine.next_t, engine.waiting) == (None, 0)
    assert drive(engine, [(0, "submit", 0, 5, 2, 6)])[-1][1] == "finished"  # twelve fit exactly
    assert engine.counters.preemptions == 0


@pytest.mark.parametrize("request_", [Request(0, 0, 1), Request(0, -1, 1, 2), Request(0, 1, 1, -1), Request(0, 1, 0)])
def test_requests_without_tokens_are_refused(request_: Request) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        build(spec()).submit(0, request_)


def test_limits_are_checked() -> None:
    with pytest.raises(ValueError, match="max_batch_tokens 3 < max_num_seqs 4"):
        build(spec(budget=3))
    with pytest.raises(ValueError, match="must be at least 1"):
        build(spec(num_blocks=0))


def test_time_runs_forward() -> None:
    engine = build(spec())
    engine.submit(5, Request(0, prompt=1, remaining=9))
    with pytest.raises(ValueError, match="already inside"):
        engine.submit(5, Request(0, prompt=1, remaining=9))
    with pytest.raises(ValueError, match="arrival at 4 ps"):
        engine.control(4, Abort(1))
    with pytest.raises(ValueError, match="arrival at 6 ps"):
        engine.control(6, Abort(1))
    with pytest.raises(ValueError, match="boundary at 6 ps, but the next one is at 5"):
        engine.boundary(6)
    engine.boundary(5)
    engine.control(5, Abort(1))  # the step from 5 has begun
    assert engine.next_t == 15
