"""What a file of settings leaves out keeps its default, table by table, in both worlds."""

from pathlib import Path

import pytest

from rlsched.errors import InputError
from rlsched.real.setup import Setup
from rlsched.real.setup import load as load_setup
from rlsched.sim.scenario import Scenario
from rlsched.sim.scenario import load as load_scenario


@pytest.mark.parametrize(("load", "default"), [(load_setup, Setup()), (load_scenario, Scenario())])
def test_a_field_of_an_inner_table_leaves_its_neighbours_alone(tmp_path: Path, load, default) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("[workload.output]\nmean = 20.0\n")
    found = load(path)
    assert found.workload.output.mean == 20.0
    assert found.workload.output.kind == default.workload.output.kind == "lognormal"
    assert found.shape == default.shape


@pytest.mark.parametrize(
    "text", ["shape = 3\n", "[workload]\nreward_s = nan\n", "[workload.output]\nmean = 'x'\n", "["]
)
def test_bad_settings_are_one_line_that_names_the_file(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    for load in (lambda: load_setup(path, steps=3), lambda: load_scenario(path, ["shape.steps=3"])):
        with pytest.raises(InputError) as error:
            load()
        assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "table",
    [
        *("task", "engine", "engine.model", "engine.pace", "engine.pace.step", "engine.pace.wake"),
        *("trainer", "trainer.model", "trainer.pace", "trainer.pace.update"),
    ],
)
def test_an_unknown_field_of_a_run_is_one_line_that_names_file_and_table(tmp_path: Path, table: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f"[{table}]\nspeling = 1\n")
    with pytest.raises(InputError) as error:
        load_setup(path)
    assert str(error.value) == f"{path}: Object contains unknown field `speling` - at `$.{table}`"


def test_steps_and_engine_are_changed_where_they_are_given(tmp_path: Path) -> None:
    found = load_setup(None, 7, "vllm")
    assert (found.shape.steps, found.engine_kind) == (7, "vllm")
    assert load_setup(None) == Setup()
