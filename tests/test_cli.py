"""The command line: what it prints, how it exits, and that bad input is one line that leaves no file behind."""

import hashlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlsched.cli import app, main
from rlsched.history import Reader, Writer, whole
from rlsched.manifest import manifest
from rlsched.naming import parse
from rlsched.policy import areal_async
from rlsched.shape import Shape
from rlsched.sim.scenario import Scenario, load

COMMANDS = tuple(name for name in app if not name.startswith("-"))
SMALL = ("--steps=3", *(f"--with=shape.{n}" for n in ("b=2", "samples=2", "engines=2", "budget=300")))

Call = tuple[int, str, str]


def command(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "rlsched", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> Call:
    """The command line in this process: its status, and what it wrote."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out, err = capsys.readouterr()
    return int(end.value.code or 0), out, err


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Bad input: status 2, one line on stderr and nothing else; the line."""
    status, out, err = call(capsys, *arguments)
    assert status == 2, out + err
    assert out == ""
    assert err.startswith("rlsched: ") and err.endswith("\n") and err.count("\n") == 1, err
    return err


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document's example: thirty versions of the asynchronous preset, one ahead."""
    path = tmp_path_factory.mktemp("recorded") / "a.jsonl"
    done = command("simulate", "areal-async,admit.eta=1", "--steps", "30", "--seed", "7", "-o", str(path))
    assert (done.returncode, done.stderr) == (0, "")
    return path


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short history."""
    path = tmp_path_factory.mktemp("small") / "a.jsonl"
    with pytest.raises(SystemExit) as end:
        main(["simulate", "areal-async,admit.eta=1", *SMALL, "-o", str(path)])
    assert end.value.code == 0
    return path


# ---- what works


def test_same_seed_same_bytes_whatever_the_hash_seed(recorded: Path, tmp_path: Path) -> None:
    first = digest(recorded)
    for number in ("0", "4242"):
        path = tmp_path / f"{number}.jsonl"
        arguments = ("areal-async,admit.eta=1", "--steps", "30", "--seed", "7", "-o", str(path))
        assert command("simulate", *arguments, PYTHONHASHSEED=number).returncode == 0
        assert digest(path) == first
    main_again = tmp_path / "again.jsonl"
    with pytest.raises(SystemExit):
        main(["simulate", "areal-async,admit.eta=1", "--steps", "30", "--seed", "7", "-o", str(main_again)])
    assert digest(main_again) == first


def test_another_seed_is_another_history(small: Path, tmp_path: Path) -> None:
    path = tmp_path / "b.jsonl"
    with pytest.raises(SystemExit):
        main(["simulate", "areal-async,admit.eta=1", *SMALL, "--seed=1", "-o", str(path)])
    assert digest(path) != digest(small)


def test_the_example_passes_its_check_and_replays(recorded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "check", recorded)
    assert (status, err) == (0, "") and "no violation" in out
    assert re.search(r"\d{4,} events", out) and "prefix" not in out
    status, out, err = call(capsys, "replay", recorded)
    assert (status, err) == (0, "") and "exact" in out


def test_json_of_every_command_parses(recorded: Path, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = call(capsys, "simulate", "areal-async", *SMALL, "--json")
    found = json.loads(out)
    assert status == 0 and found["ok"] and found["policy"] == "areal-async"
    assert found["metrics"]["versions"] == 3 and found["metrics"]["ages"] == {"0": 6}

    status, out, _ = call(capsys, "check", small, recorded, "--json")
    both = [json.loads(line) for line in out.splitlines()]
    assert status == 0 and [b["history"] for b in both] == [str(small), str(recorded)]
    assert all(b["ok"] and not b["report"]["open"] and not b["report"]["violations"] for b in both)

    status, out, _ = call(capsys, "replay", small, "--json")
    found = json.loads(out)
    assert status == 0 and found["ok"] and found["replay"]["divergence"] is None
    assert found["replay"]["facts"] + found["replay"]["answers"] == len(small.read_bytes().splitlines()) - 1

    status, out, _ = call(capsys, "compare", small, small, "--json")
    found = json.loads(out)
    assert status == 0 and found["ok"] and all(row["error"] == 0 for row in found["rows"])

    status, out, _ = call(capsys, "policies", "--json")
    assert status == 0 and [p["name"] for p in json.loads(out)] == ["verl-hybrid", "areal-async"]


def test_policies_shows_slots_and_fields(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "policies")
    assert (status, err) == (0, "")
    for word in ("verl-hybrid", "areal-async", "admit", "route", "Cap", "eta=0", "OldestFinished"):
        assert word in out


def test_schema_is_json_schema(capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, "schema")
    assert (status, err) == (0, "")
    assert json.loads(out)["$schema"].endswith("2020-12/schema")


def test_the_printed_scenario_loads_back_to_the_default(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, err = call(capsys, "scenario")
    assert (status, err) == (0, "")
    path = tmp_path / "scenario.toml"
    path.write_text(out)
    assert load(path) == Scenario()
    printed, default = tmp_path / "printed.jsonl", tmp_path / "default.jsonl"
    assert call(capsys, "simulate", "verl-hybrid", *SMALL, "--scenario", path, "-o", printed)[0] == 0
    assert call(capsys, "simulate", "verl-hybrid", *SMALL, "-o", default)[0] == 0
    assert digest(printed) == digest(default)


def test_a_name_ending_in_zst_is_compressed(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl.zst"
    assert call(capsys, "simulate", "areal-async,admit.eta=1", *SMALL, "-o", path)[0] == 0
    assert path.read_bytes().startswith(b"\x28\xb5\x2f\xfd") and path.stat().st_size < small.stat().st_size / 2
    assert list(Reader(path).events()) == list(Reader(small).events())
    assert [*contents(tmp_path)] == [path.name]
    assert call(capsys, "check", path)[0] == call(capsys, "replay", path)[0] == 0


def test_an_older_output_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    assert call(capsys, "simulate", "areal-async", *SMALL, "-o", path)[0] == 0
    assert [*contents(tmp_path)] == [path.name]
    assert call(capsys, "check", path)[0] == 0


def test_common_settings_apply(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    settings = ("--set", "admit.eta=1", "--set", "admit.C=3")
    assert call(capsys, "simulate", "areal-async", *SMALL, *settings, "-o", path)[0] == 0
    assert Reader(path).manifest.policy.slots["admit"].fields == {"eta": 1, "C": 3}


def test_a_history_matches_itself_and_not_another_policys(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = call(capsys, "compare", small, small)
    assert (status, err) == (0, "") and "ok" in out and "MISS" not in out
    other = tmp_path / "b.jsonl"
    assert call(capsys, "simulate", "verl-hybrid", *SMALL, "-o", other)[0] == 0
    status, out, err = call(capsys, "compare", small, other)
    assert (status, err) == (1, "") and "MISS" in out
    status, out, _ = call(capsys, "compare", small, other, "--json")
    assert status == 1 and not json.loads(out)["ok"]
    assert call(capsys, "compare", small, other, "--within", "1e9")[0] == 0


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, err = call(capsys, name, "--help")
    assert (status, err) == (0, "")
    assert f"rlsched {name}" in out


def test_the_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"simulate", "run", "validate", "check", "replay", "compare", "policies", "schema", "scenario"} <= {
        *COMMANDS
    }
    for arguments in ([], ["--help"]):
        status, out, err = call(capsys, *arguments)
        assert (status, err) == (0, "") and all(name in out for name in COMMANDS)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    from importlib.metadata import version

    assert call(capsys, "--version") == (0, version("rlsched") + "\n", "")


# ---- status 1: a violation, a mismatch, a run that failed


def test_a_violation_is_status_1(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = small.read_text().splitlines(keepends=True)
    torn = next(i for i, line in enumerate(lines) if '"ev":"installed"' in line and '"version":1' in line)
    path = tmp_path / "torn.jsonl"
    path.write_text("".join(lines[:torn] + lines[torn + 1 :]))
    status, out, err = call(capsys, "check", path)
    assert (status, err) == (1, "") and "line " in out and "no violation" not in out
    status, out, _ = call(capsys, "check", small, path, "--json")
    assert status == 1 and [json.loads(line)["ok"] for line in out.splitlines()] == [True, False]


def test_a_stalled_simulation_is_status_1_and_leaves_its_history(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.jsonl"
    status, out, err = call(capsys, "simulate", "areal-async", *SMALL, "--with=shape.prompts=2", "-o", path)
    assert status == 1 and "stalled" in out + err and "all 2 prompts were used" in out + err
    *_, end = Reader(path).events()
    assert not end.ok and "stalled" in end.why  # type: ignore[union-attr]
    assert call(capsys, "replay", path)[0] == 0


def test_an_altered_command_is_status_1_and_named(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = small.read_text().splitlines(keepends=True)
    at = next(i for i, line in enumerate(lines) if '"ev":"train"' in line)
    path = tmp_path / "altered.jsonl"
    path.write_text("".join([*lines[:at], lines[at].replace('"version":1', '"version":2'), *lines[at + 1 :]]))
    status, out, err = call(capsys, "replay", path)
    assert (status, err) == (1, "") and f"line {at + 1}" in out and "recorded" in out and "replayed" in out
    status, out, _ = call(capsys, "replay", path, "--json")
    found = json.loads(out)
    assert status == 1 and not found["ok"] and found["replay"]["divergence"]["line"] == at + 1


def test_an_open_history_is_checked_and_replayed_as_a_prefix(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = small.read_bytes().splitlines(keepends=True)
    path = tmp_path / "open.jsonl"
    path.write_bytes(b"".join(lines[: len(lines) // 2]))
    status, out, _ = call(capsys, "check", path)
    assert status == 0 and "prefix" in out
    assert call(capsys, "replay", path)[0] == 0


# ---- status 2: bad input


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["simulate", "nope"], "unknown policy 'nope'"),
        (["simulate", "areal-async,admit.eta=-1"], "admit.eta is -1"),
        (["simulate", "areal-async,admit.C=0"], "admit.C is 0"),
        (["simulate", "areal-async,admit.beta=1"], "no field 'beta'"),
        (["simulate", "areal-async", "--set", "admit.beta=1"], "no field 'beta'"),
        (["simulate", "areal-async,queue.n=1"], "no slot 'queue'"),
        (["simulate", "areal-async,admit.eta=x"], "admit.eta=x"),
        (["simulate", "areal-async,admit=nowhere.py:A"], "nowhere.py"),
        (["simulate", "areal-async", "--with", "engine.kv_blocks=100"], "kv_blocks"),
        (["simulate", "areal-async", "--with", "shape.b"], "table.field=value"),
        (["simulate", "areal-async", "--with", "shape=1"], "table.field=value"),
        (["simulate", "areal-async", "--with", "shape.size=1"], "size"),
        (["simulate", "areal-async", "--with", "shape.b.c=1"], "shape.b"),
        (["simulate", "areal-async", "--with", "shape.b=2", "--with", "shape.b.c=1"], "shape.b"),
        (["simulate", "areal-async", "--with", "shape.b=0"], "shape.b is 0"),
        (["simulate", "areal-async", "--with", "shape.prompts=3"], "shape.prompts is 3"),
        (["simulate", "areal-async", "--with", "workload.reject=1"], "workload.reject is 1"),
        (["simulate", "areal-async", "--with", "colour.red=1"], "colour"),
        (["simulate", "areal-async", "--with", "engine.step_s=nan"], "engine.step_s"),
        (["simulate", "areal-async", "--steps", "0"], "shape.steps is 0"),
        (["simulate", "areal-async", "--steps", "many"], "--steps"),
        (["simulate", "areal-async", "--seed"], "--seed"),
        (["simulate", "areal-async", "--scenario", "nowhere.toml"], "nowhere.toml: No such file"),
        (["simulate", "areal-async", "--colour"], "--colour"),
        (["simulate"], "policy"),
        (["simulate", "areal-async", "verl-hybrid"], "verl-hybrid"),
        (["check"], "histories"),
        (["check", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["replay", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["compare", "nowhere.jsonl", "nowhere.jsonl"], "nowhere.jsonl: No such file"),
        (["validate", "areal-async", "--repeats", "2"], "--repeats 2"),
        (["run", "areal-async", "--engine", "abacus"], "abacus"),
        (["run", "areal-async", "--engine", "vllm", "--interpreter", "/no/python"], "engine vllm: no /no/python"),
        (["run", "areal-async", "--interpreter", "/no/python"], "leave out /no/python"),
        (["dance"], "dance"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_arguments(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.jsonl").write_bytes(b"old bytes")
    output = ["-o", "old.jsonl"] if arguments[0] == "simulate" else []
    assert words in refused(capsys, *arguments, *output)
    assert contents(tmp_path) == {"old.jsonl": b"old bytes"}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[shape", "Expected ']'"),
        ("[shape]\nb = 2\nb = 3", "Cannot overwrite a value"),
        ("[shape]\nsize = 3", "size"),
        ("[colour]\nred = 1", "colour"),
        ("red = 1", "red"),
        ("shape = 3", "shape"),
        ("[shape]\nb = 'many'", "shape.b"),
        ("[shape]\nb = 0", "shape.b is 0"),
        ("[engine]\nstep_s = 0.0", "engine.step_s is 0.0"),
        ("[engine]\nstep_s = nan", "engine.step_s"),
        ("[engine]\nstep_s = inf", "engine.step_s"),
        ("[engine]\nmax_num_seqs = 0", "engine.max_num_seqs is 0"),
        ("[engine]\nseq_s = -1.0", "engine.seq_s is -1.0"),
        ("[transport]\nipc_gbps = 0.0", "transport.ipc_gbps is 0.0"),
        ("[workload.prompt]\nkind = 'lognormal'", "workload.prompt.most"),
        ("[workload.output]\nmean = 0.0", "mean length of 0.0"),
        ("[shape]\nbudget = 1000000", "engine.kv_blocks"),
        ("[workload.prompt]\nmean = 1000000.0", "engine.kv_blocks"),
        ("[workload]\nreward_s = nan", "workload.reward_s"),
        ("[workload.output]\nmean = nan", "mean"),
    ],
)
def test_bad_scenarios(text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.toml"
    path.write_text(text)
    line = refused(capsys, "simulate", "areal-async", "--scenario", path, "--steps=1", "-o", tmp_path / "new.jsonl")
    assert str(path) in line and words in line
    assert [*contents(tmp_path)] == ["scenario.toml"]


def test_a_scenario_that_is_no_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "scenario.toml"
    path.write_bytes(b"\xff\xfe\x00")
    assert str(path) in refused(capsys, "simulate", "areal-async", "--scenario", path)
    assert "directory" in refused(capsys, "simulate", "areal-async", "--scenario", tmp_path)


BROKEN = {
    "truncated": (lambda lines: b"".join(lines)[:-7], "--salvage"),
    "newer": (lambda lines: lines[0].replace(b'"schema":1', b'"schema":2') + b"".join(lines[1:]), "newer rlsched"),
    "empty": (lambda lines: b"", "empty"),
    "headless": (lambda lines: b"".join(lines[1:]), "line 1: not a manifest"),
    "garbage": (lambda lines: bytes(range(256)) * 9, "line 1: not a manifest"),
    "unknown kind": (lambda lines: b"".join([*lines[:4], b'{"ev":"explode"}\n']), "line 5"),
    "unknown field": (lambda lines: b"".join([*lines[:4], b'{"ev":"begin","t":0,"x":0}\n']), "line 5"),
    "after the end": (lambda lines: b"".join([*lines, lines[3]]), "after the end"),
    "damaged zstd": (lambda lines: b"\x28\xb5\x2f\xfd" + bytes(64), "damaged"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_histories(name: str, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make, words = BROKEN[name]
    path = tmp_path / "broken.jsonl"
    path.write_bytes(make(small.read_bytes().splitlines(keepends=True)))
    for arguments in (["check", path], ["check", small, path, "--json"], ["replay", path], ["compare", path, small]):
        status, _, err = call(capsys, *arguments)
        assert status == 2 and err.count("\n") == 1 and err.startswith("rlsched: "), err
        assert str(path) in err and words in err


def test_salvage_reads_the_whole_lines_of_a_truncated_history(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cut.jsonl"
    path.write_bytes(b"".join(small.read_bytes().splitlines(keepends=True)[:50])[:-7])
    status, out, err = call(capsys, "check", path, "--salvage")
    assert (status, err) == (0, "") and "prefix" in out
    assert call(capsys, "replay", path, "--salvage")[0] == 0


def test_a_folder_is_no_history(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("check", "replay"):
        assert "directory" in refused(capsys, name, tmp_path)


# ---- outputs that can't be written


def test_an_output_in_a_missing_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "missing" / "a.jsonl"
    line = refused(capsys, "simulate", "areal-async", *SMALL, "-o", path)
    assert str(path) in line and "No such file or directory" in line
    assert [*tmp_path.iterdir()] == []


def test_an_output_that_is_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    assert str(folder) in refused(capsys, "simulate", "areal-async", *SMALL, "-o", folder)
    assert [*tmp_path.iterdir()] == [folder] and folder.is_dir()


def test_an_output_that_is_no_regular_file_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Such as /dev/null: renaming over it would take it away from everyone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert str(pipe) in refused(capsys, "simulate", "areal-async", *SMALL, "-o", pipe)
    assert pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]


def test_an_output_that_another_run_is_writing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a.jsonl"
    with whole(path) as part, Writer(part) as first:
        first.begin(manifest("sim", areal_async(), Shape(), 0))
        assert "another run is writing it" in refused(capsys, "simulate", "areal-async", *SMALL, "-o", path)
    assert list(Reader(path).events()) == [] and [*contents(tmp_path)] == [path.name]


def test_a_reader_that_left_is_no_error() -> None:
    """As in ``rlsched scenario | head -1``."""
    for name in ("scenario", "schema", "policies"):
        gone, end = os.pipe()
        os.close(gone)
        child = subprocess.run([sys.executable, "-m", "rlsched", name], stdout=end, stderr=subprocess.PIPE, check=False)
        os.close(end)
        assert (child.returncode, child.stderr) == (0, b"")


# ---- user code that fails

HEADER = """
from rlsched.decisions import Batch, Hold, Install, Move, Start, Verdict, Wait
from rlsched.shape import Device, Promises
from rlsched.slot import Slot
from rlsched.slots.place import Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.select import FirstFinished
"""

DECISIONS: dict[str, list[str]] = {
    "admit": [
        *("raise KeyError('x\\ny')", "return None", "return 3", "return [3]", "return Start(0, 2, 2)"),
        *(
            "return [Start(5, 0, 2)]",
            "return [Start(5, 3, 2)]",
            "return [Start(-1, 2, 2)]",
            "return [Start('x', 2, 2)]",
        ),
        *("return [Start(5, None, 2)]", "return [Start(5, 2.5, 2.5)]", "return [Start(0, 2, 2)] * 2"),
        *("return [Start(5, 2, 2, None)]", "return [Start(5, 2, 2, (), [])]", "return [Start(5, 2, 2, (), 'x', 'y')]"),
    ],
    "select": [
        *("raise RuntimeError", "return None", "return []", "return Batch([], 0, True)", "return Batch([99], 0, True)"),
        *(
            "return Batch(None, 0, True)",
            "return Batch([[1]], 0, True)",
            "return Wait(None)",
            "return Wait('x', 'soon')",
        ),
        "return Batch([*ledger.buffer] * 2, 0, True) if ledger.buffer else Wait('')",
        "return Batch([*ledger.buffer], 7, True) if ledger.buffer else Wait('')",
        "return Batch([*ledger.buffer], 0, 'yes') if ledger.buffer else Wait('')",
    ],
    "expire": [
        *("return 1 / 0", "return None", "return [None]", "return [Verdict(99, 'drop', '')]"),
        *("return [Verdict([1], 'drop', '')]", "return [Verdict(g, 'sell', '') for g in ledger.buffer]"),
        "return [Verdict(g, 'drop', None) for g in ledger.buffer]",
        "return [Verdict(g, 'drop', '') for g in ledger.buffer] * 2",
    ],
    "publish": [
        *("raise AttributeError('gone')", "return 5", "return []", "return Install(99, [0])", "return Install(1, [])"),
        *("return Install(1, [99])", "return Install(1, [0, 0])", "return Install(1, 5)", "return Install(1, ['a'])"),
        *(
            "return Install(1, [0], 'pigeon')",
            "return Install(1, [0], bucket=0)",
            "return Install(1, [0], fate='sell')",
            "return Install(1, [0], fate='retract', flush=False)",
        ),
    ],
    "place": [
        *("raise StopIteration", "return None", "return [5]", "return [Move(99, 'trainer')]"),
        *("return [Move([1], 'trainer')]", "return [Move(0, 'nobody')]", "return [Move(0, 'trainer', fate='keep')]"),
    ],
    "route": [
        *("raise MemoryError", "return None", "return 99", "return -1", "return 'engine-0'", "return [0]"),
    ],
}

PARAMETERS = {"expire": "self, state, ledger, trigger", "route": "self, state, ledger, rollout, cause"}


@pytest.mark.parametrize(
    ("slot", "body"),
    [(slot, body) for slot, bodies in DECISIONS.items() for body in bodies],
)
def test_a_slot_whose_decide_fails(slot: str, body: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = "Disaggregated" if slot == "place" else "Slot"
    parameters = PARAMETERS.get(slot, "self, state, ledger")
    source = f"class Odd({base}, frozen=True):\n    def decide({parameters}):\n        {body}\n"
    (tmp_path / "odd.py").write_text(HEADER + source)
    (tmp_path / "old.jsonl").write_bytes(b"old bytes")
    policy = f"areal-async,{slot}={tmp_path}/odd.py:Odd"
    line = refused(capsys, "simulate", policy, *SMALL, "-o", tmp_path / "old.jsonl")
    assert f"slot {slot} (Odd): " in line
    assert contents(tmp_path)["old.jsonl"] == b"old bytes" and {*contents(tmp_path)} == {"odd.py", "old.jsonl"}


@pytest.mark.parametrize(
    ("slot", "base", "method"),
    [
        ("admit", "Slot", "def start(self, shape, seed): raise KeyError('x')"),
        ("admit", "Slot", "def observe(self, state, event, ledger): raise KeyError('x')"),
        ("select", "FirstFinished", "def promises(self, shape): raise KeyError('x')"),
        ("select", "FirstFinished", "def promises(self, shape): return None"),
        ("select", "FirstFinished", "def start(self): return None"),
        ("place", "Disaggregated", "def layout(self, shape): raise KeyError('x')"),
        ("place", "Disaggregated", "def layout(self, shape): return None"),
        ("place", "Disaggregated", "def layout(self, shape): return [1, 2]"),
        ("place", "Disaggregated", "def layout(self, shape): return []"),
        ("place", "Disaggregated", "def layout(self, shape): return [Device('a', 0, True, 'engine')]"),
        ("place", "Disaggregated", "def layout(self, shape): return [Device(0, 0, True, 'nobody')]"),
        ("place", "Disaggregated", "def layout(self, shape): return [Device(0, 0, True, 'engine')] * 2"),
    ],
)
def test_a_slot_whose_other_methods_fail(
    slot: str, base: str, method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    decide = "    def decide(self, *_): return []\n" if base == "Slot" else ""
    (tmp_path / "odd.py").write_text(f"{HEADER}class Odd({base}, frozen=True):\n    {method}\n{decide}")
    policy = f"areal-async,{slot}={tmp_path}/odd.py:Odd"
    line = refused(capsys, "simulate", policy, *SMALL, "-o", tmp_path / "new.jsonl")
    assert slot in line and "Odd" in line
    assert [*contents(tmp_path)] == ["odd.py"]


def test_a_slot_that_can_not_be_written_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "odd.py").write_text(HEADER + "class Odd(FirstFinished, frozen=True):\n    thing: object = object()\n")
    policy = f"areal-async,select={tmp_path}/odd.py:Odd"
    line = refused(capsys, "simulate", policy, *SMALL, "-o", tmp_path / "new.jsonl")
    assert "select" in line and "Odd" in line
    assert [*contents(tmp_path)] == ["odd.py"]


def test_the_users_working_slot_runs_and_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(HEADER + "class Mine(FirstFinished, frozen=True):\n    n: int = 1\n")
    path = tmp_path / "a.jsonl"
    policy = f"areal-async,select={tmp_path}/mine.py:Mine,select.n=3"
    assert call(capsys, "simulate", policy, *SMALL, "-o", path)[0] == 0
    assert call(capsys, "replay", path)[0] == call(capsys, "check", path)[0] == 0
    (tmp_path / "mine.py").unlink()
    again = command("replay", str(path))
    assert again.returncode == 2 and again.stderr.count("\n") == 1
    assert again.stderr.startswith("rlsched: ") and "mine.py: no such file" in again.stderr


def test_bad_input_in_a_process_of_its_own(tmp_path: Path) -> None:
    done = command("simulate", "areal-async,admit.eta=-1", "-o", str(tmp_path / "a.jsonl"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("rlsched: ") and done.stderr.count("\n") == 1
    assert [*tmp_path.iterdir()] == []


def test_what_is_named_like_markup_is_printed_as_it_is(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "[bold] :A: history with a name that is longer than a line of eighty columns.jsonl"
    path.write_bytes(small.read_bytes())
    for name in ("check", "replay"):
        status, out, _ = call(capsys, name, path)
        assert status == 0 and out.startswith(f"{path}: ")


def test_every_preset_is_named_in_the_help_of_unknown_ones(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "simulate", "nope")
    found: list[Any] = [parse(name) for name in re.findall(r"[a-z]+-[a-z]+", line)]
    assert len(found) == 2
