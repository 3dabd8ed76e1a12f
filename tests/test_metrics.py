"""What a history measures: small histories whose every answer can be told by hand."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlsched.commands import Abort, Flush, Generate, Pause, Resume, Train, Transfer, Work
from rlsched.compare import compare, row, spread
from rlsched.facts import Begin, Done, Down, End, Installed, Phase, Resident, Scored, Segment, Trained
from rlsched.metrics import Metrics, measure, total_variation
from rlsched.notes import Accept, Admit, Cancel, Drop, Go, Publish, Reject, Wait
from rlsched.shape import Device

S = 10**9

APART = [Device(0, 0, False, "engine"), Device(1, 1, False, "engine"), Device(2, None, True, "trainer")]
"""Two engines and a trainer on devices of their own."""


def admit(group: int, first: int, n: int = 1) -> Admit:
    return Admit(group, group, 0, n, n, first)


def send(id: int, engine: int, *rollouts: int) -> Generate:
    return Generate(id, engine, [Work(r, r) for r in rollouts])


def segment(t: int, by: int, rollout: int, engine: int, version: int, n: int, end: Any = "stop") -> Segment:
    return Segment(t * S, by, rollout, engine, version, n, end, version)


# Two versions of one group each. The second group's rollout is interrupted by the first update.
#
#   s    2     4     6     8    10    12    14    16    18    20
#   e0   [r0-------]                 |r2---------]
#   e1   [r1-------------------]     |r1-]
#   trn        waits    [train-][snd]    w[train--][send]
#                                  publish 1        publish 2
STORY: list[Any] = [
    *(Installed(0, 0, 0, 0, 10), Installed(0, 0, 1, 0, 10), Begin(2 * S)),
    *(Wait("trainer", "groups"), admit(0, 0), admit(1, 1), send(1, 0, 0), send(2, 1, 1)),
    *(segment(6, 1, 0, 0, 0, 40), Done(6 * S, 1), Scored(6 * S, 0, 1.0), Accept(0)),
    *(Go("trainer"), Train(3, 1, 0, True, [0], [0])),
    *(Phase(9 * S, 3, "update", 3 * S), Trained(9 * S, 3, 1, 40), Done(9 * S, 3), Abort(4, 1, [1], "resume")),
    *(segment(10, 2, 1, 1, 0, 30, "abort"), Done(10 * S, 2), Done(10 * S, 4), Pause(5, 0), Pause(6, 1)),
    *(Done(10 * S, 5), Done(10 * S, 6), Transfer(7, 1, [0, 1], "ipc", 9)),
    *(Installed(12 * S, 7, 0, 1, 10), Installed(12 * S, 7, 1, 1, 10), Done(12 * S, 7), Flush(8, 0), Flush(9, 1)),
    *(Done(12 * S, 8), Done(12 * S, 9), Publish(1, [0, 1]), Resume(10, 0), Resume(11, 1), Wait("trainer", "groups")),
    *(admit(2, 2), send(12, 1, 1), send(13, 0, 2)),
    *(segment(14, 12, 1, 1, 1, 10), Done(14 * S, 12), Scored(14 * S, 1, 0.0), Accept(1)),
    *(Go("trainer"), Train(14, 2, 0, True, [1], [1])),
    *(Trained(17 * S, 14, 2, 40), Done(17 * S, 14)),
    *(segment(18, 13, 2, 0, 1, 50), Done(18 * S, 13), Scored(18 * S, 2, 0.5), Accept(2)),
    *(Transfer(15, 2, [0, 1], "ipc", 9), Done(20 * S, 15), Publish(2, [0, 1])),
    *(End(25 * S, 0),),
]


def test_every_measure_of_a_story_told_by_hand() -> None:
    found = measure(APART, STORY)
    assert found.versions == 2
    assert found.duration_s == pytest.approx(18)  # Begin at 2, the last publish at 20
    assert found.step_s == pytest.approx(9)
    assert found.generation_s == pytest.approx((8 + 6) / 2)  # 2…10 and 12…18
    assert found.wait_s == pytest.approx((4 + 2) / 2)  # 2…6 and 12…14
    assert found.train_s == pytest.approx((3 + 3) / 2)
    assert found.sync_s == pytest.approx((3 + 3) / 2)  # 9…12 and 17…20
    assert found.tokens == 40 + 30 + 10 + 50
    assert found.tokens_per_s == pytest.approx(130 / 18)
    assert found.engine_idle == pytest.approx(1 - (4 + 6 + 8 + 2) / 36)
    assert found.trainer_idle == pytest.approx(1 - (3 + 3 + 2 + 2) / 18)
    assert found.interrupted == 1
    assert found.reward == pytest.approx(0.5)
    assert found.ages == {0: 1, 1: 1}


def test_what_follows_the_last_publish_is_not_measured() -> None:
    closing = [segment(24, 13, 9, 0, 2, 999, "abort"), Scored(24 * S, 9, 99.0)]
    assert measure(APART, [*STORY[:-1], *closing, STORY[-1]]) == measure(APART, STORY)


def test_a_shift_of_the_beginning_changes_nothing() -> None:
    """Set-up takes no part: the clock runs from Begin."""

    def later(event: Any) -> Any:
        if isinstance(event, Begin | Done | Scored | Trained | Installed | Segment | Phase | End):
            return type(event)(event.t + 7 * S, *[getattr(event, f) for f in event.__struct_fields__[1:]])
        return event

    assert measure(APART, map(later, STORY)) == measure(APART, STORY)


def test_rollouts_live_at_the_last_publish_count_up_to_it() -> None:
    found = measure(APART, [e for e in STORY if getattr(e, "rollout", None) != 2])
    assert found.generation_s == pytest.approx((8 + 8) / 2)
    assert found.engine_idle == pytest.approx(1 - (4 + 8 + 8 + 2) / 36)


def test_a_cancelled_or_finished_rollout_is_no_interruption() -> None:
    """Only what an abort returned to go on later counts."""
    start = [Begin(0), admit(0, 0, 3), send(1, 0, 0, 1, 2)]
    recall = [Abort(2, 0, [0], "cancel"), Abort(3, 0, [1, 2], "restart")]
    back = [segment(1, 1, 0, 0, 0, 1, "abort"), segment(1, 1, 1, 0, 0, 1, "abort"), segment(1, 1, 2, 0, 0, 1, "stop")]
    assert measure(APART, [*start, *recall, *back, Publish(1, [0])]).interrupted == 1


def test_an_install_amid_a_request_is_no_interruption() -> None:
    story = [
        *(Begin(0), admit(0, 0), send(1, 0, 0), segment(1, 1, 0, 0, 0, 5, "install"), segment(4, 1, 0, 0, 1, 5)),
        *(Done(4 * S, 1), Scored(4 * S, 0), Accept(0), Train(2, 1, 0, True, [0], [0]), Done(6 * S, 2), Publish(1, [0])),
    ]
    found = measure(APART, story)
    assert found.interrupted == 0 and found.tokens == 10
    assert found.generation_s == pytest.approx(4)
    assert found.engine_idle == pytest.approx(1 - 4 / 12)


def test_age_is_that_of_the_oldest_token_when_training_begins() -> None:
    """k batches of one version share its number; tokens of later versions don't make a group younger."""

    def grown(group: int, *versions: int) -> list[Any]:
        made = [segment(1, 1, group, 0, v, 1, "install") for v in versions[:-1]]
        last = segment(1, 1, group, 0, versions[-1], 1)
        return [admit(group, group), send(1, 0, group), *made, last, Scored(S, group), Accept(group)]

    story = [
        *(Begin(0), *grown(0, 0), *grown(1, 0), Train(2, 1, 0, False, [0], [0]), Train(3, 1, 1, True, [1], [1])),
        *(*grown(2, 1), *grown(3, 0, 1), *grown(4, 1, 0), Train(4, 2, 0, True, [2, 3, 4], [2, 3, 4])),
        *(*grown(5, 2), *grown(6, 0), Train(5, 3, 0, True, [5, 6], [5, 6]), Publish(3, [0])),
    ]
    assert measure(APART, story).ages == {0: 4, 1: 2, 2: 1}


def test_groups_that_were_not_trained_have_no_age() -> None:
    gone = [Reject(0, ""), Drop(1, ""), Cancel(2, "")]
    made = [line for g in range(4) for line in (admit(g, g), send(1, 0, g), segment(1, 1, g, 0, 0, 1))]
    found = measure(APART, [Begin(0), *made, *gone, Train(2, 1, 0, True, [3], [3]), Done(2 * S, 2), Publish(1, [0])])
    assert found.ages == {0: 1} and found.tokens == 4


def test_zero_tokens_have_no_age_and_no_version() -> None:
    story = [
        *(Begin(0), admit(0, 0), Train(1, 1, 0, True, [], []), Train(2, 2, 0, True, [], []), send(3, 0, 0)),
        *(segment(1, 3, 0, 0, 0, 0, "abort"), send(4, 0, 0), segment(2, 4, 0, 0, 2, 5), Scored(2 * S, 0), Accept(0)),
        *(Train(5, 3, 0, True, [0], [0]), Publish(3, [0])),
    ]
    assert measure(APART, story).ages == {0: 1}


def test_an_engine_that_goes_down_is_idle_from_then_on() -> None:
    story = [
        *(Begin(0), admit(0, 0), send(1, 0, 0), Down(2 * S, 0, "it died"), send(2, 1, 0), segment(4, 2, 0, 1, 0, 8)),
        *(Done(4 * S, 2), Scored(4 * S, 0), Accept(0), Train(3, 1, 0, True, [0], [0]), Done(8 * S, 3)),
        *(Publish(1, [1]),),
    ]
    found = measure(APART, story)
    assert found.engine_idle == pytest.approx(1 - (2 + 2) / 16)
    assert found.generation_s == pytest.approx(4)


def test_a_history_without_a_publish_is_measured_up_to_its_last_fact() -> None:
    """Else a run that stalled would claim to have been billions of times faster."""
    found = measure(APART, [Begin(S), admit(0, 0), send(1, 0, 0), segment(5, 1, 0, 0, 0, 8), End(5 * S, ok=False)])
    assert found.versions == 0 and found.tokens == 8
    assert found.duration_s == pytest.approx(4)
    assert found.tokens_per_s == pytest.approx(2)
    assert found.engine_idle == pytest.approx(1 - 4 / 8)
    assert found.trainer_idle == pytest.approx(1)


def test_a_history_that_only_began_has_measures_too() -> None:
    for story in ([], [Begin(0)], [Resident(0, 0, 0, "engine", "kv", 1), Begin(5)]):
        found = measure(APART, story)
        assert found.versions == found.tokens == found.interrupted == 0 and found.ages == {}
        assert 0 <= found.engine_idle <= 1 and 0 <= found.trainer_idle <= 1


# ---- distances and comparisons

histograms = st.dictionaries(st.integers(0, 9), st.integers(1, 99), max_size=6)


def test_total_variation_of_histograms_told_by_hand() -> None:
    assert total_variation({0: 3, 1: 1}, {0: 6, 1: 2}) == 0
    assert total_variation({0: 5}, {1: 7}) == 1
    assert total_variation({0: 3, 1: 1}, {0: 1, 1: 1}) == pytest.approx(0.25)
    assert total_variation({}, {}) == 0


@given(histograms, histograms)
def test_total_variation_is_a_distance_of_at_most_one(a: dict[int, int], b: dict[int, int]) -> None:
    assert total_variation(a, b) == pytest.approx(total_variation(b, a))
    assert -1e-9 <= total_variation(a, b) <= 1 + 1e-9
    assert total_variation(a, a) == 0


def test_spread_is_the_range_over_the_median() -> None:
    assert spread([9.0, 10.0, 12.0]) == pytest.approx(0.3)
    assert spread([5.0]) == 0 and spread([0.0, 0.0]) == 0


@pytest.mark.parametrize(
    ("real", "sim", "bound", "good"),
    [
        ([10.0], 11.0, 0.1, True),
        ([10.0], 11.1, 0.1, False),
        ([10.0], 8.9, 0.1, False),
        ([9.0, 10.0, 11.0], 13.9, 0.4, True),
        ([9.0, 10.0, 11.0], 14.1, 0.4, False),
        ([0.001], 0.003, 0.1, True),
        ([0.001], 0.0031, 0.1, False),
        ([0.0], 0.0, 0.1, True),
        ([0.0], 1.0, 0.1, False),
    ],
)
def test_a_prediction_matches_within_the_bound_or_twice_the_spread(
    real: list[float], sim: float, bound: float, good: bool
) -> None:
    found = row("step_s", real, sim, 0.1)
    assert found.bound == pytest.approx(bound) and found.good == good


def test_a_measure_that_is_not_judged_always_matches() -> None:
    found = row("wait_s", [1.0], 99.0, None)
    assert found.bound is None and found.good


def test_repeats_are_compared_by_their_median() -> None:
    def of(step: float, ages: dict[int, int]) -> Metrics:
        return Metrics(1, step, step, 1.0, 0.0, 1.0, 1.0, 1, 1.0, 0.0, 0.0, 0, 0.0, ages)

    rows = {r.name: r for r in compare([of(9.9, {0: 1}), of(10.0, {0: 1}), of(30.0, {1: 1})], of(10.1, {0: 1}))}
    assert rows["step_s"].real == 10.0 and rows["step_s"].spread == pytest.approx(2.01)
    assert rows["age_tv"].sim == 0 and rows["age_tv"].spread == 1
    assert all(r.good for r in rows.values())
