"""Scenarios: what a file leaves out keeps its default, what it gets wrong is named, and the template says it all."""

import tomllib
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlsched.errors import InputError
from rlsched.shape import Shape
from rlsched.sim.scenario import EngineCosts, Scenario, TransportCosts, load
from rlsched.sim.template import template
from rlsched.workload import Length, Workload


def refused(path: Path | None, *changes: str) -> str:
    with pytest.raises(InputError) as caught:
        load(path, changes)
    message = str(caught.value)
    assert "\n" not in message
    return message


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Fields by their dotted names."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= leaves(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
    return found


FIELDS = leaves(msgspec.to_builtins(Scenario()))
NUMBERS = [name for name, value in FIELDS.items() if isinstance(value, int | float) and not isinstance(value, bool)]


# ---- loading


def test_nothing_is_the_default() -> None:
    assert load(None) == Scenario()


def test_an_empty_file_is_the_default(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("# nothing\n")
    assert load(path) == Scenario()


def test_what_a_file_leaves_out_keeps_its_default(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[shape]\nb = 4\n[workload.output]\nsigma = 0.1\n")
    found, default = load(path), Scenario()
    assert found.shape == msgspec.structs.replace(default.shape, b=4)
    assert found.workload.output == msgspec.structs.replace(default.workload.output, sigma=0.1)
    assert found.workload.prompt == default.workload.prompt
    assert found.engine == default.engine


def test_changes_come_on_top_of_the_file_in_their_order(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("[shape]\nb = 4\nsteps = 3\n")
    found = load(path, ["shape.b=5", "shape.b=6", "workload.output.kind=fixed", "shape.prompts=99"])
    assert (found.shape.b, found.shape.steps, found.shape.prompts) == (6, 3, 99)
    assert found.workload.output.kind == "fixed"
    assert load(path, ["shape.prompts=99", "shape.prompts=null"]).shape.prompts is None


def test_integers_stand_for_whole_seconds() -> None:
    assert load(None, ["workload.reward_s=2"]).workload.reward_s == 2.0


@pytest.mark.parametrize("name", NUMBERS)
def test_every_number_can_be_changed_and_none_may_be_words(name: str) -> None:
    *tables, field = name.split(".")
    value = FIELDS[name]
    given = 0.25 if field in ("group", "reject") else value + 1
    found: Any = load(None, [f"{name}={given}"])
    for table in tables:
        found = getattr(found, table)
    assert getattr(found, field) == given
    assert name in refused(None, f"{name}=lots")


@pytest.mark.parametrize("value", ["-1", "nan", "inf", "-inf"])
def test_no_number_may_be_negative_or_without_end(value: str, tmp_path: Path) -> None:
    """A nan passes every comparison, and an infinite time never ends."""
    path, taken = tmp_path / "s.toml", []
    for name in NUMBERS:
        table, _, field = name.rpartition(".")
        path.write_text(f"[{table}]\n{field} = {value}\n")
        try:
            load(path)
        except InputError as error:
            assert str(error).startswith(f"{path}: ")
            assert table.partition(".")[0] in str(error)
        else:
            taken.append(name)
    assert taken == []


# ---- refusals


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("shape", "table.field=value"),
        ("shape=3", "table.field=value"),
        ("=3", "table.field=value"),
        ("shape.=3", "shape"),
        (".b=3", "unknown field"),
        ("shape.b", "table.field=value"),
        ("shape.size=3", "size"),
        ("colour.red=3", "colour"),
        ("workload.output.kind=weibull", "workload.output.kind"),
        ("workload.output.kind=3", "workload.output.kind"),
        ("engine.kv_blocks=1.5", "engine.kv_blocks"),
        ("shape.b.c=3", "shape.b"),
        ("workload.output=3", "workload.output"),
        ("shape.b=0", "shape.b is 0"),
        ("shape.prompts=31", "shape.prompts is 31"),
        ("engine.block_size=0", "engine.block_size is 0"),
        ("engine.max_batch_tokens=0", "engine.max_batch_tokens is 0"),
        ("memory.offload_gbps=0", "memory.offload_gbps is 0"),
        ("transport.broadcast_gbps=0", "transport.broadcast_gbps is 0"),
        ("control.latency_s=-1", "control.latency_s is -1"),
    ],
)
def test_a_bad_change_is_named(change: str, words: str) -> None:
    assert words in refused(None, change)


def test_a_change_below_a_field_that_was_just_set() -> None:
    assert "shape.b" in refused(None, "shape.b=2", "shape.b.c=3")


def test_a_change_below_what_a_file_made_a_number(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text("shape = 3\n")
    assert "shape" in refused(path, "shape.b=2")


def test_a_file_that_can_not_be_read_is_named(tmp_path: Path) -> None:
    assert refused(tmp_path / "no.toml") == f"{tmp_path / 'no.toml'}: No such file or directory"
    assert refused(tmp_path) == f"{tmp_path}: Is a directory"
    path = tmp_path / "s.toml"
    for content in (b"[shape", b"\xff", b"b == 1", b"\x00"):
        path.write_bytes(content)
        assert refused(path).startswith(f"{path}: ")


@pytest.mark.parametrize("scale", [1, 3])
def test_what_can_never_fit_into_kv_is_refused_to_the_token(scale: int) -> None:
    engine = EngineCosts(kv_blocks=10 * scale, block_size=16)
    room = 160 * scale
    load_ = Workload(prompt=Length(mean=60.0))
    assert Scenario(shape=Shape(budget=room - 60), workload=load_, engine=engine)
    with pytest.raises(InputError, match=r"can never fit into engine\.kv_blocks"):
        Scenario(shape=Shape(budget=room - 59), workload=load_, engine=engine)
    most = Workload(prompt=Length(mean=60.0), output=Length("lognormal", 50.0, most=room - 60))
    assert Scenario(shape=Shape(budget=10**6), workload=most, engine=engine), "the longest output is what counts"


# ---- costs


def test_a_bucket_takes_its_overhead_and_its_bytes() -> None:
    costs = TransportCosts(
        ipc_begin_s=1.0,
        ipc_bucket_s=0.5,
        ipc_gbps=2.0,
        broadcast_begin_s=3.0,
        broadcast_bucket_s=0.25,
        broadcast_gbps=4.0,
    )
    assert costs.begin_s("ipc") == 1.0 and costs.begin_s("broadcast") == 3.0
    assert costs.bucket_s("ipc", 10**9) == 0.5 + 0.5
    assert costs.bucket_s("broadcast", 10**9) == 0.25 + 0.25


# ---- the template


def test_the_template_loads_back_to_the_default(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(template())
    assert load(path) == Scenario()


def test_the_template_names_every_field_once() -> None:
    """Those that are left out by default stand there as comments."""
    written = leaves(tomllib.loads(template()))
    optional = {name for name, value in FIELDS.items() if value is None}
    assert {*written} == {*FIELDS} - optional
    for name in optional:
        assert f"# {name.rpartition('.')[2]} =" in template()


def test_every_field_of_the_template_is_explained() -> None:
    lines = template().splitlines()
    for before, line in pairwise(lines):
        if " = " in line and not line.startswith("# "):
            assert before.startswith("# ") and not before.endswith("="), line


def test_every_number_of_the_template_says_its_unit() -> None:
    """Of times and sizes; the others are counts, tokens or shares."""
    lines = template().splitlines()
    for number, line in enumerate(lines):
        field = line.partition(" =")[0]
        doc = " ".join(lines[max(0, number - 3) : number]).lower()
        if field.endswith("_s"):
            assert "second" in doc or "latency" in doc, line
        elif field.endswith(("_gb", "_gbps")):
            assert "10⁹" in doc or "bytes" in doc, line
