"""Requests that stand in pauses: what is told of them then, and what is left to tell when they come back."""

from __future__ import annotations

import pytest

from rlsched.commands import Generate, Work
from rlsched.real.requests import Home, Requests
from rlsched.real.rollouts import Span

pytestmark = pytest.mark.real

Told = list[tuple[int, int, int, int]]


def sent(*rollouts: int, engine: int = 0) -> Requests:
    """One command's rollouts inside an engine."""
    requests = Requests()
    requests.send(Generate(7, engine, [Work(r, r) for r in rollouts]))
    return requests


def stand(requests: Requests, live: dict[str, int], version: int) -> Told:
    told: Told = []
    requests.stand(0, live, version, lambda *words: told.append(words))
    return told


def test_a_request_that_never_stood_is_what_the_engine_says() -> None:
    requests = sent(1, 2)
    assert requests.back(1, 5, 3, 4) == Home(7, False, [Span(3, 5)], 3)
    assert requests.back(2, 0, 4, 4) == Home(7, True, [Span(4, 0)], 4)
    assert 1 not in requests


def test_what_was_told_in_pauses_is_not_told_again() -> None:
    requests = sent(2, 1)
    assert stand(requests, {"1": 3, "2": 4, "held-out": 9}, 0) == [(7, 1, 3, 0), (7, 2, 4, 0)]
    assert stand(requests, {"1": 3, "2": 6}, 1) == [(7, 2, 2, 0)]
    assert requests.back(2, 9, 0, 2) == Home(7, False, [Span(0, 4), Span(1, 2), Span(2, 3)], 0)
    assert requests.back(1, 3, 0, 2) == Home(7, True, [Span(0, 3), Span(2, 0)], 0)


def test_what_was_retracted_stands_on_kv_of_the_version_that_came() -> None:
    requests = sent(1, 2)
    assert stand(requests, {"1": 3, "2": 0}, 0) == [(7, 1, 3, 0)]
    requests.retract(0)
    assert stand(requests, {"1": 5, "2": 0}, 1) == [(7, 1, 2, 1)]
    requests.retract(0)
    assert requests.back(1, 6, 0, 2) == Home(7, False, [Span(0, 3), Span(1, 2), Span(2, 1)], 2)
    assert requests.back(2, 4, 0, 2) == Home(7, True, [Span(2, 4)], 2), "its prompt was half computed before"


@pytest.mark.parametrize(("began", "kv"), [(1, 1), (0, 0)])
def test_a_request_without_a_token_in_the_pause_makes_all_under_the_next_version(began: int, kv: int) -> None:
    """It was queued, and began after the install; or its prompt was half computed, and stays so."""
    requests = sent(1)
    assert stand(requests, {"1": 0}, 0) == []
    assert requests.back(1, 4, began, 1) == Home(7, True, [Span(1, 4)], kv)


def test_tokens_that_do_not_add_up_are_refused() -> None:
    requests = sent(1, 2)
    stand(requests, {"1": 3, "2": 1}, 0)
    assert requests.moved(0, {"1": 3, "2": 1, "held-out": 2}) == ""
    assert requests.moved(0, {"1": 4, "2": 1}) == "rollout 1 had 3 tokens in the pause and has 4"
    with pytest.raises(ValueError, match="rollout 1 had 3 tokens in a pause, and came back with 2"):
        requests.back(1, 2, 0, 1)


def test_a_dead_engine_takes_along_what_was_told() -> None:
    requests = sent(1)
    stand(requests, {"1": 3}, 0)
    assert requests.lose(0) == [1]
    requests.send(Generate(8, 1, [Work(1, 1)]))
    assert requests.back(1, 2, 1, 1) == Home(8, True, [Span(1, 2)], 1)
