"""The cyclic-repeat task: its split, its order and its grader."""

from __future__ import annotations

import pytest

from rlsched.real.task import Task, answer, grade

pytestmark = pytest.mark.real


def test_split_is_disjoint_and_complete():
    task = Task()
    training = {tuple(p) for p in task.training_prompts()}
    held_out = {tuple(p) for p in task.evaluation_prompts()}
    assert len(held_out) == 64
    assert len(training) == 8**3 - 64
    assert not training & held_out


def test_prompts_begin_with_bos_and_hold_symbols_only():
    task = Task()
    for prompt in task.training_prompts() + task.evaluation_prompts():
        assert prompt[0] == task.bos
        assert len(prompt) == 4
        assert all(8 <= token < 16 for token in prompt[1:])


def test_every_epoch_is_another_permutation_of_the_training_prompts():
    task = Task()
    size = len(task.training_prompts())
    first = [tuple(task.prompt(i)) for i in range(size)]
    second = [tuple(task.prompt(size + i)) for i in range(size)]
    assert sorted(first) == sorted(second) == sorted(map(tuple, task.training_prompts()))
    assert first != second


def test_prompts_are_a_function_of_seed_and_index():
    assert [Task(seed=3).prompt(i) for i in range(50)] == [Task(seed=3).prompt(i) for i in range(50)]
    assert [Task(seed=3).prompt(i) for i in range(50)] != [Task(seed=4).prompt(i) for i in range(50)]
    assert Task().prompt(0) == [1, 8, 15, 11]  # also in another process, and next year


@pytest.mark.parametrize(
    ("output", "total", "length"),
    [
        ([8, 9, 10, 8, 9, 10], 1.0, 1.0),
        ([8, 9, 10], 0.5, 0.5),
        ([8, 9, 10, 8, 9, 10, 3, 3], 1.0, 1.0),
        ([9, 9, 9, 9, 9, 9], 2 / 6, 1.0),
        ([], 0.0, 0.0),
    ],
    ids=["right", "short", "long", "partly", "empty"],
)
def test_grade(output, total, length):
    graded = grade([1, 8, 9, 10], output, 6)
    assert graded.total == pytest.approx(total)
    assert graded.components == {"correct": graded.total, "length": length}


def test_the_answer_earns_everything():
    task = Task()
    for index in range(20):
        assert grade(task.prompt(index), answer(task.prompt(index), 11), 11).total == 1.0
