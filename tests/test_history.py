"""The history file: it is read back as written, refused with its place when broken, and readable after a kill."""

import gc
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from rlsched.commands import (
    Abort,
    Flush,
    Generate,
    Load,
    Offload,
    Pause,
    Resume,
    Sleep,
    Stop,
    Timer,
    Train,
    Transfer,
    Wake,
    Work,
)
from rlsched.errors import InputError
from rlsched.facts import (
    Begin,
    Bucket,
    Done,
    Down,
    End,
    Fact,
    Installed,
    Observed,
    Phase,
    Resident,
    Scored,
    Segment,
    Trained,
    Up,
    Updating,
)
from rlsched.history import Event, Reader, Writer, schema, whole
from rlsched.manifest import SCHEMA, Manifest, manifest
from rlsched.notes import Accept, Admit, Cancel, Drop, Go, Publish, Reject, Wait
from rlsched.policy import areal_async
from rlsched.shape import Shape

HEAD = manifest("sim", areal_async(), Shape(), 3, version_bytes=10, workload={"mean": 4}, versions={"engine": "1.0"})

BARE: list[Any] = [
    *(Begin(0), Segment(1, 1, 0, 0, 0, 4, "stop", 0), Scored(2, 0), Phase(3, 2, "update", 5), Trained(4, 2, 1, 4)),
    *(Updating(5, 3, 0, 1), Bucket(6, 3, 0, 0, 10), Installed(7, 3, 0, 1, 10), Resident(8, 0, 0, "engine", "kv", 9)),
    *(Done(9, 3), Observed(10, 3, "rss", 0.5), Down(11), Up(12, 2)),
    *(Generate(1, 0, [Work(0, 0)]), Abort(2, 0, [0], "resume"), Pause(3, 0), Resume(4, 0), Flush(5, 0), Sleep(6, 0, 2)),
    *(Wake(7, 0, ["kv"]), Load(8, ["optimizer"]), Offload(9, ["parameters"]), Train(10, 1, 0, True, [0], [0])),
    *(Transfer(11, 1, [0], "ipc", 4), Timer(12, 99), Stop(13)),
    *(Admit(0, 0, 0, 1, 1, 0), Accept(0), Reject(0, "filtered"), Drop(0, "old"), Cancel(0, "old"), Publish(1, [0])),
    *(Wait("trainer", "groups"), Go("trainer"), End(12)),
]
"""One of each kind, with its defaults."""

FULL: list[Any] = [
    *(Scored(2, 0, -1.5, {"format": 0.25}, False), Trained(4, 2, 1, 4, {"loss": 1e-9}), Bucket(6, 3, 0, 0, 10, 7)),
    *(Installed(7, 3, 0, 1, 10, False), Done(9, 3, False, "out of memory"), Down(11, 2, "it died"), Stop(13, "enough")),
    *(Generate(1, 0, [Work(5, 4, 3, 2, 1), Work(6, 4)]), Abort(2, 1, [5, 6], "cancel"), Flush(5, 1, True)),
    *(Admit(7, 6, 5, 2, 3, 21, 4, ["long", "hard"], "eval"), Drop(0, "old", True), Cancel(0, "old", True)),
    End(12, 13, False, "stalled"),
]
"""Those that have defaults, with other values."""


def write(path: Path, events: list[Any], flush_every: int = 256) -> Path:
    with Writer(path, flush_every) as writer:
        writer.begin(HEAD)
        for event in events:
            writer.write(event)
    return path


def read(path: Path, salvage: bool = False) -> list[Event]:
    return list(Reader(path, salvage).events())


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return write(tmp_path / "good.jsonl", [Begin(0), Wait("trainer", "groups"), End(1)])


def refused(path: Path, salvage: bool = False) -> str:
    with pytest.raises(InputError) as caught:
        read(path, salvage)
    message = str(caught.value)
    assert message.startswith(str(path)) and "\n" not in message
    return message


# ---- round trips


def test_the_samples_are_of_every_kind() -> None:
    assert {type(event) for event in BARE} == {*get_args(Event)}
    optional = {type(e) for e in BARE if type(e).__struct_defaults__}
    assert optional <= {type(event) for event in FULL}


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
@pytest.mark.parametrize("events", [BARE, FULL], ids=["bare", "full"])
def test_every_kind_of_event_is_read_back(tmp_path: Path, events: list[Any], name: str) -> None:
    path = write(tmp_path / name, events)
    reader = Reader(path)
    assert reader.manifest == HEAD
    assert reader.open
    assert list(reader.events()) == events
    assert not reader.open
    assert reader.line == len(events) + 1


@given(st.text(st.characters(exclude_categories=["Cs"])), st.integers(0, 2**63 - 1))
def test_any_text_and_any_time_survive(text: str, t: int) -> None:
    for event in (Down(t, 0, text), Observed(t, 0, text, 1.5), Wait(text, text), Stop(t, text)):
        raw = msgspec.json.encode(event)
        assert b"\n" not in raw
        assert msgspec.json.decode(raw, type=Event) == event


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.zst"])
def test_many_flushes_and_one_make_the_same_history(tmp_path: Path, suffix: str) -> None:
    events: list[Any] = [*map(Begin, range(1000)), End(1000)]
    assert read(write(tmp_path / f"a{suffix}", events, 1)) == read(write(tmp_path / f"b{suffix}", events)) == events


def test_zstd_is_told_by_content_and_not_by_name(tmp_path: Path) -> None:
    packed = write(tmp_path / "a.jsonl.zst", BARE)
    assert packed.read_bytes().startswith(zstandard.FRAME_HEADER)
    assert read(packed.rename(tmp_path / "packed.jsonl")) == BARE
    plain = write(tmp_path / "b.jsonl", BARE)
    assert plain.read_bytes().startswith(b'{"ev":"manifest"')
    assert read(plain.rename(tmp_path / "plain.zst")) == BARE


def test_zstd_of_several_frames_is_one_history(tmp_path: Path, good: Path) -> None:
    path = tmp_path / "frames.zst"
    path.write_bytes(b"".join(zstandard.compress(line) for line in lines(good)))
    assert read(path) == read(good)


# ---- refusals


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"ev":"explode","t":1}', "explode"),
        (b'{"ev":"begin","t":1,"colour":2}', "colour"),
        (b'{"ev":"done","t":1}', "cmd"),
        (b'{"ev":"begin","t":"noon"}', "int"),
        (b'{"ev":"begin","t":1.5}', "int"),
        (b'{"t":1}', "ev"),
        (b"[1]", "object"),
        (b"", "truncated"),
        (b"\xff\xfe", "line 3"),
        (b'{"ev":"drop","group":1,"why":"\xff"}', "line 3"),
        (b'{"ev":"segment","t":1,"by":1,"rollout":0,"engine":0,"version":0,"n":1,"end":"bored","kv_from":0}', "bored"),
        (b"[" * 100_000, "line 3"),
    ],
    ids=[
        *("kind", "field", "missing", "type", "fraction", "no kind", "no object", "blank", "binary", "no utf-8"),
        *("literal", "deep"),
    ],
)
def test_a_line_that_is_no_event_is_refused_with_its_place(good: Path, line: bytes, words: str) -> None:
    head, first, *_ = lines(good)
    good.write_bytes(head + first + line + b"\n")
    message = refused(good)
    assert "line 3" in message and words in message
    assert refused(good, salvage=True) == message


def test_a_newer_schema_is_refused(good: Path) -> None:
    head, *rest = lines(good)
    raw = json.loads(head)
    for schema_number in (SCHEMA + 1, 0, -1, "1", None, 1.5, True):
        good.write_bytes(json.dumps({**raw, "schema": schema_number}).encode() + b"\n" + b"".join(rest))
        message = refused(good)
        assert "line 1" in message and "schema" in message
    del raw["schema"]
    good.write_bytes(json.dumps(raw).encode() + b"\n")
    assert "schema" in refused(good)
    good.write_bytes(json.dumps({**raw, "schema": SCHEMA + 1}).encode() + b"\n")
    assert "newer rlsched" in refused(good)


@pytest.mark.parametrize(
    "head",
    [b'{"ev":"begin","t":0}', b"{}", b"[]", b"17", b"no json", b"\x00\x01\x02", b"", b"[" * 100_000],
    ids=["event", "object", "list", "number", "words", "binary", "blank", "deep"],
)
def test_a_history_without_its_manifest_is_refused(good: Path, head: bytes) -> None:
    good.write_bytes(head + b"\n" + b"".join(lines(good)[1:]))
    assert "line 1: not a manifest" in refused(good)


def test_a_manifest_with_an_unknown_or_missing_field_is_refused(good: Path) -> None:
    raw = json.loads(lines(good)[0])
    good.write_bytes(json.dumps({**raw, "colour": "red"}).encode() + b"\n")
    assert "line 1" in refused(good) and "colour" in refused(good)
    del raw["seed"]
    good.write_bytes(json.dumps(raw).encode() + b"\n")
    assert "line 1" in refused(good) and "seed" in refused(good)
    raw["seed"] = 0
    raw["shape"]["b"] = 0
    good.write_bytes(json.dumps(raw).encode() + b"\n")
    assert "line 1" in refused(good) and "at least 1" in refused(good)


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    for name, content in (("plain", b""), ("packed", zstandard.compress(b""))):
        path = tmp_path / name
        path.write_bytes(content)
        assert "empty" in refused(path)


def test_what_can_not_be_opened_is_refused(tmp_path: Path) -> None:
    assert "No such file" in refused(tmp_path / "missing.jsonl")
    assert "directory" in refused(tmp_path)


def test_an_event_after_the_end_is_refused(good: Path) -> None:
    good.write_bytes(good.read_bytes() + lines(good)[1])
    assert "line 5: an event after the end" in refused(good)


def test_damaged_zstd_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zst", BARE)
    raw = bytearray(path.read_bytes())
    for at in range(4, len(raw), 7):
        damaged = raw.copy()
        damaged[at] ^= 0xFF
        path.write_bytes(damaged)
        try:
            found = read(path)
        except InputError as error:
            assert "\n" not in str(error)
        else:
            assert len(found) <= len(BARE)
    path.write_bytes(raw + b"and more")
    assert "damaged" in refused(path)


# ---- cuts


def test_a_file_cut_within_a_line_names_it_and_salvage_reads_the_whole_ones(good: Path) -> None:
    raw, events = good.read_bytes(), read(good)
    ends = [at + 1 for at, byte in enumerate(raw) if byte == ord("\n")]
    for cut in sorted({*range(1, len(raw), 7), *ends[:-1]}):
        good.write_bytes(raw[:cut])
        before = sum(end <= cut for end in ends)
        if cut in ends:
            reader = Reader(good)
            assert list(reader.events()) == events[: before - 1] and reader.open
        elif before == 0:
            assert "line 1" in refused(good)
            assert "empty" in refused(good, salvage=True)
        else:
            message = refused(good)
            assert f"line {before + 1}" in message and "--salvage" in message
            reader = Reader(good, salvage=True)
            assert list(reader.events()) == events[: before - 1] and reader.open


def test_a_cut_zstd_file_gives_a_prefix_or_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "a.zst", BARE, flush_every=4)
    raw, counts = path.read_bytes(), set()
    for cut in range(1, len(raw), 2):
        path.write_bytes(raw[:cut])
        try:
            found = read(path, salvage=True)
        except InputError as error:
            assert "\n" not in str(error)
            continue
        assert found == BARE[: len(found)]
        counts.add(len(found))
    assert counts >= {*range(0, len(BARE), 4)}


# ---- killed, shared and failed writers

KILLED = """
import os, signal, sys
from rlsched.facts import Begin
from rlsched.history import Writer
from rlsched.manifest import manifest
from rlsched.policy import areal_async
from rlsched.shape import Shape
writer = Writer(sys.argv[1], flush_every=4)
writer.begin(manifest("sim", areal_async(), Shape(), 3))
for t in range(int(sys.argv[2])):
    writer.write(Begin(t))
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.zst"])
@pytest.mark.parametrize(("written", "readable"), [(0, 0), (3, 0), (11, 8)])
def test_a_killed_run_is_readable_up_to_its_last_flush(tmp_path: Path, name: str, written: int, readable: int) -> None:
    path = tmp_path / name
    child = subprocess.run([sys.executable, "-c", KILLED, str(path), str(written)], check=False)
    assert child.returncode == -signal.SIGKILL
    reader = Reader(path)
    assert list(reader.events()) == [*map(Begin, range(readable))]
    assert reader.open
    assert len(read(write(path, [Begin(0), End(1)]))) == 2, "the lock died with its holder"


def test_what_was_flushed_can_be_read_while_the_run_goes_on(tmp_path: Path) -> None:
    for name in ("a.jsonl", "a.zst"):
        with Writer(tmp_path / name, flush_every=2) as writer:
            writer.begin(HEAD)
            for t in range(5):
                writer.write(Begin(t))
            assert read(tmp_path / name) == [*map(Begin, range(4))]


def test_a_second_writer_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with Writer(path) as first:
        first.begin(HEAD)
        first.write(Begin(0))
        with pytest.raises(InputError, match=r"a\.jsonl: another run is writing it"):
            Writer(path)
        first.write(End(1))
    assert read(path) == [Begin(0), End(1)]


def test_a_second_run_with_the_same_output_is_refused_and_harms_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with whole(path) as part, Writer(part) as first:
        first.begin(HEAD)
        with pytest.raises(InputError, match="another run is writing"), whole(path) as again, Writer(again):
            pass
        first.write(End(1))
    assert read(path) == [End(1)]
    assert [*tmp_path.iterdir()] == [path]


def test_a_new_history_replaces_what_stood_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"x" * 10_000)
    assert read(write(path, [End(1)])) == [End(1)]


def test_a_file_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        Writer(tmp_path / "missing" / "a.jsonl")
    with pytest.raises(InputError, match="directory"):
        Writer(tmp_path)


def test_an_output_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("old")
    with pytest.raises(RuntimeError), whole(path) as part:
        part.write_text("half")
        assert path.read_text() == "old"
        raise RuntimeError
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "old"
    with whole(path) as part:
        part.write_text("new")
    assert [*tmp_path.iterdir()] == [path] and path.read_text() == "new"


def test_closing_twice_is_closing_once(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a.zst")
    writer.begin(HEAD)
    writer.close()
    writer.close()
    assert read(tmp_path / "a.zst") == []


# ---- the published schema


def kinds(tree: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each kind of line that the schema describes."""
    for ref in tree["anyOf"]:
        found = tree["$defs"][ref["$ref"].removeprefix("#/$defs/")]
        yield found["properties"]["ev"]["enum"][0], found


def fits(line: dict[str, Any], tree: dict[str, Any]) -> bool:
    """Whether the schema has the line's kind, all of its fields, and none more that is required."""
    found = dict(kinds(tree)).get(line.get("ev", ""))
    return found is not None and {*found["required"]} <= {*line} <= {*found["properties"]}


def samples() -> Iterator[dict[str, Any]]:
    for line in (HEAD, *BARE, *FULL):
        yield json.loads(msgspec.json.encode(line))


def refs(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict):
        yield from [tree["$ref"]] if "$ref" in tree else []
        tree = [*tree.values()]
    if isinstance(tree, list):
        for branch in tree:
            yield from refs(branch)


def test_the_schema_describes_every_line() -> None:
    tree = json.loads(json.dumps(schema()))
    assert tree["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert str(SCHEMA) in tree["title"]
    assert {*refs(tree)} <= {f"#/$defs/{name}" for name in tree["$defs"]}
    described = {k: found["additionalProperties"] for k, found in kinds(tree)}
    assert described == {kind.__struct_config__.tag: False for kind in (Manifest, *get_args(Event))}
    for line in samples():
        assert fits(line, tree), line
        assert not fits({**line, "colour": 1}, tree)
        assert not fits({**line, "ev": "explode"}, tree)
    for event in BARE:
        line = json.loads(msgspec.json.encode(event))
        for field in {*line} - {"ev"}:
            assert not fits({k: v for k, v in line.items() if k != field}, tree)


def test_the_schema_accepts_and_refuses_as_a_validator_does() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    validator = jsonschema.Draft202012Validator(schema())
    validator.check_schema(schema())
    for line in samples():
        assert validator.is_valid(line)
        assert not validator.is_valid({**line, "colour": 1})
        assert not validator.is_valid({**line, "ev": "explode"})
    assert not validator.is_valid({"ev": "begin", "t": "noon"})


def test_every_fact_has_its_time_first() -> None:
    """A reader that skips kinds it doesn't care for can still tell the time."""
    for event in BARE:
        if isinstance(event, Fact):
            assert [*json.loads(msgspec.json.encode(event))][:2] == ["ev", "t"]


def test_nothing_is_left_open(tmp_path: Path, good: Path) -> None:
    """A reader that stops early, or is refused, gives its file back."""
    folder = Path(f"/proc/{os.getpid()}/fd")
    if not folder.is_dir():
        pytest.skip("no /proc to count open files in")
    gc.collect()
    before = len([*folder.iterdir()])
    reader = Reader(good)
    next(reader.events())
    del reader
    refused(write(tmp_path / "after.jsonl", [End(0), End(1)]))
    with Writer(tmp_path / "a.jsonl"), pytest.raises(InputError):
        Writer(tmp_path / "a.jsonl")
    gc.collect()  # pytest's note of an exception is a cycle
    assert len([*folder.iterdir()]) == before
