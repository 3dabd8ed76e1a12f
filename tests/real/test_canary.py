"""Canary weights: what tokens say of the weights that made them, and that no wrong handling gets past them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from rlsched import report
from rlsched.checker import check
from rlsched.cli import main
from rlsched.facts import Segment
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.real import canary_matrix, installs
from rlsched.real.canary import (
    BASE,
    BOS,
    PARTS,
    SIGNS,
    VOCAB,
    Claim,
    Label,
    Mismatch,
    Reading,
    Run,
    label,
    lift,
    mismatches,
    read,
    runs,
    state,
    token,
)
from rlsched.real.canary_faults import AWAKE, CANNOT, FAULTS, HANDLED, TRANSPORTS, Cell, cells, left_out
from rlsched.real.canary_forger import Forger
from rlsched.real.canary_handling import prompt_of
from rlsched.real.canary_matrix import Bench, Matrix, matrix
from rlsched.real.canary_run import audit, canary, logged
from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.engines import Capabilities
from rlsched.real.job import engines, perform
from rlsched.real.learning import Withheld
from rlsched.real.model import CANARY, ModelSpec, build, fill
from rlsched.real.rig import Rig
from rlsched.real.setup import Setup
from rlsched.real.transport import BroadcastBuckets, Checkpoints, SharedBuckets
from rlsched.shape import Shape

pytestmark = pytest.mark.real


# ---------------------------------------------------------------- tokens


def test_every_token_says_one_thing_and_every_thing_has_one_token():
    said = {read(t, 3) for t in range(BASE, VOCAB)}
    assert len(said) == VOCAB - BASE == 512
    assert all(token(reading) == t for t in range(BASE, VOCAB) if (reading := read(t, 3)))
    assert [read(t, 3) for t in (*range(BASE), VOCAB)] == [None] * (BASE + 1)


def test_versions_are_those_near_the_one_expected():
    for near in range(40):
        found = [lift(code, near) for code in range(8)]
        assert [v % 8 for v in found] == list(range(8))
        assert all(v >= 0 for v in found)
        if near >= 4:
            assert sorted(found) == list(range(near - 4, near + 4))


def test_claims_are_held_against_tokens():
    whole, kept = token(Reading(4, 4)), token(Reading(5, 4, ("kv",)))
    assert mismatches([whole, whole, kept], [Claim(2, 4, 4), Claim(1, 5, 4)]) == []
    # A label that was read too late, KV that was not flushed, and numbers of tokens that don't agree.
    assert mismatches([whole, whole], [Claim(2, 5, 5)]) == [Mismatch(0, 2, Reading(5, 5), Reading(4, 4))]
    assert mismatches([whole, kept], [Claim(1, 4, 4), Claim(1, 5, 5)]) == [
        Mismatch(1, 1, Reading(5, 5), Reading(5, 4, ("kv",)))
    ]
    assert mismatches([whole, whole], [Claim(1, 4, 4)]) == [Mismatch(1, 1, None, Reading(4, 4))]
    assert mismatches([whole], [Claim(2, 4, 4)]) == [Mismatch(1, 1, Reading(4, 4), None)]
    assert mismatches([7], []) == [Mismatch(0, 1, None, None)]
    assert runs([whole, whole, kept, 0], 5) == [
        Run(2, Reading(4, 4)),
        Run(1, Reading(5, 4, ("kv",))),
        Run(1, None),
    ]
    assert str(Run(2, Reading(5, 4, ("kv",)))) == "2 × v5 on KV of v4, foreign: kv"
    assert str(Mismatch(1, 1, None, None)) == "1 from token 1 say no canary token; claimed: nothing"


def test_a_librarys_own_label_is_held_against_tokens():
    tokens = [token(Reading(4, 4))] * 126 + [token(Reading(5, 4, ("kv",)))] * 3
    right = label([(4, 100), (4, 26), (5, 3), (6, 0)], tokens, 5)
    assert right.right and right == Label([(4, 126), (5, 3)], [(4, 126), (5, 3)])
    assert str(right) == "own label right"
    # One token too few, as SGLang counted where a step was under way; a version that never came; none at all.
    late = label([(4, 125), (5, 4)], tokens, 5)
    assert not late.right
    assert str(late) == "own label wrong: says 125 of v4, 4 of v5; tokens say 126 of v4, 3 of v5"
    assert not label([(5, 129)], tokens, 5).right
    assert not label([], tokens, 5).right and label([], [], 5).right
    assert str(label([(4, 1)], [0], 5)) == "own label wrong: says 1 of v4; tokens say 1 of no version"


# ---------------------------------------------------------------- weights


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)  # two on two shared cores are far slower
    return build(CANARY)


def test_the_spec_has_the_shapes(model):
    assert sum(p.numel() for p in model.parameters()) == CANARY.parameters()
    assert dict(model.named_parameters()).keys() == state(0).keys()
    with pytest.raises(RuntimeError):
        build(replace(CANARY, hidden=32))
    with pytest.raises(ValueError, match="version 1 of random weights"):
        fill(model, ModelSpec(), 1)


def test_only_some_parameters_carry_the_version():
    one, two, again = state(1), state(2), state(9)
    differ = {name for name in one if not torch.equal(one[name], two[name])}
    assert differ == {name for names in PARTS.values() for name in names}
    assert all(torch.equal(one[name], again[name]) for name in one)


@pytest.mark.parametrize("prompt", [[BOS], [BOS, 8, 9, 10], [BOS, *([8, 15] * 300)]])
def test_whole_weights_say_their_version(model, greedy, prompt):
    for version in range(9):
        fill(model, CANARY, version)
        assert runs(greedy(model, prompt, 6), version) == [Run(6, Reading(version, version))]


def test_a_missing_part_is_named(model, greedy):
    said = {}
    for part, names in PARTS.items():
        model.load_state_dict({**state(6), **{name: state(5)[name] for name in names}})
        (said[part],) = runs(greedy(model, [BOS, 8, 9, 10], 6), 6)
    assert {part: run.said for part, run in said.items()} == {
        "embedding": Reading(6, 6, ("embedding",)),
        "MLP": Reading(6, 6, ("mlp",)),
        "head": Reading(5, 6, SIGNS),
        "v_proj 0": Reading(6, 5),
        "v_proj 1": Reading(6, 6, ("kv",)),
    }


def test_every_mixture_of_two_versions_says_something_else(model, greedy):
    said = Counter()
    for mixture in range(32):
        old = [name for i, names in enumerate(PARTS.values()) if mixture & 1 << i for name in names]
        model.load_state_dict({**state(3), **{name: state(2)[name] for name in old}})
        (run,) = runs(greedy(model, [BOS, 8, 9, 10], 1), 3)
        said[run.said] += 1
    # Only the two whole versions say that nothing is foreign and k = a.
    assert said[Reading(3, 3)] == said[Reading(2, 2)] == 1
    assert len(said) == 32


# ---------------------------------------------------------------- engine and trainer


@pytest.fixture(scope="module")
def engine(rig):
    return rig.engine("engine", EngineConfig(model=CANARY, temperature=0.0))


def test_a_trainer_on_canary_weights_holds_what_it_trained_and_sends_it(rig, engine, tmp_path):
    trainer = rig.trainer("trainer", TrainerConfig(model=CANARY))
    prompt = [BOS, 8, 9, 10]
    batch = [Sample(prompt, [token(Reading(0, 0))] * 4, [0.0] * 4, float(i % 2), 0) for i in range(4)]

    async def versions():
        said = []
        transports = [SharedBuckets(), BroadcastBuckets(), Checkpoints(tmp_path)]
        for version, transport in enumerate(transports, 1):
            told = await trainer.train(batch, version)
            assert told.optimizer_steps == version
            await engine.pause()
            assert not (await transport.push(trainer, [engine], version)).failed
            await engine.resume()
            said.append(runs((await rig.generate(engine, f"v{version}", prompt, 5)).tokens, version))
            await transport.close()
        return said

    assert rig.run(versions()) == [[Run(5, Reading(v, v))] for v in (1, 2, 3)]


def test_kept_kv_shows_after_a_thousand_tokens_and_one_update_more(rig, engine):
    prompt = [BOS, *([8, 15] * 500)]

    async def kept():
        source, transport = Forger(), SharedBuckets()
        await engine.reset(0)
        await engine.submit("kept", prompt, 60)
        cuts = [0]
        for version in (1, 2):
            await rig.until_generated(engine, cuts[-1] + 4)
            source.hold(version)
            pushed = await transport.push(source, [engine], version)
            cuts.append(pushed.updated["engine"].live["kept"])
            await engine.resume()
        (end,) = await rig.end_of("kept")
        await transport.close()
        return [*cuts, len(end.tokens)], end

    cuts, end = rig.run(kept())
    assert len(end.tokens) == 60 and end.version == 0
    claims = [Claim(high - low, version, 0) for version, (low, high) in enumerate(pairwise(cuts))]
    assert all(claim.n >= 4 for claim in claims[:2]) and claims[2].n > 0
    assert mismatches(end.tokens, claims) == []
    # Had a flush been promised, all tokens after the first update would contradict it.
    flushed = [replace(claim, kv=claim.version) for claim in claims]
    assert [wrong.n for wrong in mismatches(end.tokens, flushed)] == [claim.n for claim in claims[1:]]


# ---------------------------------------------------------------- the matrix

ABLE = Capabilities(
    engine="any",
    version="1",
    device="cpu",
    max_request_tokens=4096,
    kv_tokens=8192,
    max_requests=64,
    max_batch_tokens=512,
    pause_modes=("keep", "retract", "abort", "wait"),
    flush_live=True,
    sleep_levels=(1, 2),
    sleep_frees=("weights", "kv"),
    wake_tags=("weights", "kv"),
    transports=("shared", "broadcast", "disk"),
    in_place_update=True,
    abort_partials=True,
    step_trace=True,
)


def some(cell: Cell) -> bool:
    """Every right handling by one transport and from a disk; every fault in each pause mode it can meet."""
    if cell.transport == "disk":
        return cell.fault == "none" and not cell.bare
    if cell.fault.startswith("old ") and cell.fault != "old head" and cell.handling.pause != "keep":
        return False
    return cell.transport in ("", TRANSPORTS[not cell.handling.flush])


@pytest.fixture(scope="module")
def found() -> Matrix:
    return asyncio.run(matrix(wanted=some))


@pytest.fixture(scope="module")
def filled(found) -> list[Cell]:
    return found.cells


def test_the_matrix_is_whole():
    everything = list(cells(ABLE, careless=True))
    assert {c.fault for c in everything} == {"none", *FAULTS}
    assert {c.invariant for c in everything} - {""} == {"ATOMIC", "EFFECT", "REPLICA", "LABEL", "KV", "WEIGHTS"}
    for fault, seeded in FAULTS.items():
        assert {c.handling for c in everything if c.fault == fault} == set(seeded.handled)
    right = {(c.handling, c.transport) for c in everything if c.fault == "none" and not c.bare}
    assert len(right) == 13 * 3
    # Each pause mode meets a flush and none, torn, phantom and stale ones included.
    for fault in ("none", "old head", "phantom", "stale replica"):
        met = {(c.handling.pause, c.handling.flush) for c in everything if c.fault == fault}
        assert met == {(mode, flush) for mode in ABLE.pause_modes for flush in (True, False)}


def test_what_an_engine_can_not_do_is_left_out_and_said():
    assert left_out(ABLE, careless=True) == {}
    poor = replace(ABLE, pause_modes=("keep", "abort"), sleep_levels=(), sleep_frees=())
    lacking = {"pause retract", "pause wait", "sleep"}
    assert left_out(poor, careless=True).keys() == lacking | {"no update"}
    assert left_out(poor, careless=False).keys() == lacking | {f for f, seeded in FAULTS.items() if seeded.bare}
    assert "no weights back on this cpu" in left_out(poor, careless=True)["no update"]
    kept = list(cells(poor, careless=False))
    assert {c.handling.pause for c in kept} == {"keep", "abort"}
    assert not any(c.bare or FAULTS[c.fault].bare for c in kept if c.fault != "none")
    assert {c.handling for c in kept if c.fault == "none"} == {h for h in AWAKE if h.pause in poor.pause_modes}
    for engine, fault, mode in CANNOT:
        named = replace(ABLE, engine=engine)
        (what,) = left_out(named, careless=True)
        assert what == f"{fault}, pause {mode}"
        assert not any(c.fault == fault and c.handling.pause == mode for c in cells(named, careless=True))


def test_prompts_cover_whole_pages():
    assert [len(prompt_of(page)) for page in (1, 16, 32, 64)] == [40, 40, 80, 160]
    assert all(prompt.count(BOS) == 1 and max(prompt) < BASE for prompt in map(prompt_of, (16, 32)))


def test_the_embedded_engine_is_asked_what_it_can_do(found):
    assert (found.engine, found.device, found.pause_modes) == ("transformers", "cpu", ["keep", "retract", "abort"])
    assert found.left_out == {"pause wait": "this engine has keep, retract, abort"}
    assert not any(c.own for c in found.cells)  # transformers says no version itself


def test_right_handlings_decode_what_they_claim(filled):
    right = [c for c in filled if c.fault == "none"]
    assert {c.handling for c in right} == {h for h in HANDLED if h.pause != "wait"}
    for c in right:
        assert c.good and not any(a.mismatches for a in c.answers), c
        # And they say something: the update is seen in the running request, or before and after it.
        versions = [run.said.version for a in c.answers for run in a.said]
        assert len(set(versions)) == 2 and versions == sorted(versions)
    held = {c.handling: c for c in right if c.handling.running == "hold"}
    assert len(held) == 4
    for handling, c in held.items():
        first, second = c.answers[0].said
        kept = handling.pause == "keep" and not handling.flush
        new = first.said.version + 1
        assert second.said == (Reading(new, new - 1, ("kv",)) if kept else Reading(new, new))


def test_every_wrong_handling_is_caught_in_the_tokens(filled):
    wrong = [c for c in filled if c.fault != "none"]
    assert {c.fault for c in wrong} == FAULTS.keys()
    assert [c for c in wrong if not c.good] == []
    assert all(c.shown for c in wrong)


def test_what_the_guards_say_is_told(filled):
    guards = {fault: {c.guard.partition(":")[0] for c in filled if c.fault == fault} for fault in FAULTS}
    assert guards == {
        **{f"old {part}": {"refused"} for part in PARTS},
        "half the buckets": {"refused"},
        "no pause": {"refused"},
        "kept KV": {"refused"},
        "no update": {"refused"},
        "late abort": {"harmless here"},
        "stale prefix": {"harmless here"},
        "phantom": {"none"},
        "stale replica": {"none"},
        "late label": {"none"},
    }


@pytest.mark.nightly
def test_the_whole_matrix():
    found = asyncio.run(matrix())
    assert [c for c in found.cells if not c.good] == [] and found.good


def test_a_fault_that_is_not_there_is_not_seen(monkeypatch, tmp_path):
    """Each wrong cell is good because of its fault: without it, its tokens show nothing."""
    hold = Forger.hold
    monkeypatch.setattr(Forger, "hold", lambda self, called, *_, **__: hold(self, called))

    async def fill_them():
        bench = await Bench.start(tmp_path)
        try:
            wanted = ("old head", "phantom", "half the buckets")
            whole = bench.matrix("transformers", lambda c: c.fault in wanted and c.transport == TRANSPORTS[0])
            chosen = [c for c in whole.cells if c.handling.flush and c.handling.pause == "keep"]
            for cell in chosen:
                await bench.fill(cell)
            return chosen
        finally:
            await bench.close()

    found = asyncio.run(fill_them())
    assert len(found) == 4 + 4 + 3
    assert not any(c.good or any(a.mismatches for a in c.answers) for c in found)


def test_the_library_leaks_a_token_when_a_request_is_cancelled_inside_its_pause(model):
    """What `bare` imitates, in transformers itself: the request lives a step longer, under the new weights."""
    from rlsched.real.engines.batching import ContinuousBatchingConfig, GenerationConfig

    fill(model, CANARY, 0)
    manager = model.init_continuous_batching(
        generation_config=GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=64, page_size=16),
    )
    manager.warmup()
    manager.start()
    try:
        for attempt in range(20):
            name = f"r{attempt}"
            manager.add_request([BOS, 8, 9, 10], request_id=name, max_new_tokens=500)
            active = manager.batch_processor.scheduler.active_requests
            while not (name in active and len(active[name].generated_tokens) >= 4):
                time.sleep(0.001)
            with manager.pause():
                held = active[name]
                fill(model, CANARY, attempt + 1)
                manager.cancel_request(name)
            while name in active:
                time.sleep(0.001)
            said = runs(held.generated_tokens, attempt)
            assert said[0].said.version == attempt
            if len(said) > 1:
                assert (said[1].n, said[1].said) == (1, Reading(attempt + 1, attempt, ("kv",)))
                return
        pytest.fail("not one of 20 leaked")
    finally:
        manager.stop(block=True)
        manager.destroy()


# ---------------------------------------------------------------- whole runs

JOB = canary(Setup(shape=Shape(b=2, samples=2, steps=5, budget=96)))


def run(policy, path, **options):
    chosen = parse(policy)

    async def go():
        rig = await Rig.start(JOB, engines(chosen, JOB), **options)
        try:
            return await perform(rig, chosen, 0, path)
        finally:
            await rig.close()

    _, end = asyncio.run(go())
    assert end.ok, end.why
    assert check(Reader(path)).ok


@pytest.fixture(scope="module")
def mixed(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("mixed") / "history.jsonl"
    run("areal-async,admit.eta=1", path)
    return path


def test_every_segment_of_an_asynchronous_run_is_of_its_version(mixed):
    found = audit(Reader(mixed).events(), logged(mixed))
    assert found.good, found
    assert found.versions[:4] == [0, 1, 2, 3]  # the last one may come too late for a token
    assert found.mixed >= 3
    assert found.rollouts >= 5 * 2 * 2 and found.tokens > 200


def test_every_segment_of_a_colocated_run_is_of_its_version(tmp_path):
    path = tmp_path / "history.jsonl"
    run("verl-hybrid", path)
    found = audit(Reader(path).events(), logged(path))
    assert found.good, found
    assert (found.versions, found.mixed) == ([0, 1, 2, 3, 4], 0)


def test_a_wrong_label_in_a_history_is_caught(mixed):
    events = list(Reader(mixed).events())
    rollouts = list(logged(mixed))
    scored = {r.rollout for r in rollouts}
    chosen = [i for i, e in enumerate(events) if isinstance(e, Segment) and e.n and e.rollout in scored]
    for i in chosen[:: max(1, len(chosen) // 5)]:
        event = events[i]
        late = replace(event, version=event.version + 1, kv_from=event.version + 1)
        found = audit([*events[:i], late, *events[i + 1 :]], rollouts)
        assert list(found.labels) == [event.rollout]
        (wrong,) = found.labels[event.rollout]
        assert wrong.n >= event.n and wrong.said.version == event.version


def test_a_phantom_update_passes_every_check_but_the_tokens(tmp_path):
    """Versions advance, checksums agree, the checker is content; yet every token is of version 0."""
    path = tmp_path / "history.jsonl"
    run("areal-async,admit.eta=1", path, trainer=Withheld)
    rollouts = list(logged(path))
    found = audit(Reader(path).events(), rollouts)
    assert not found.good and len(found.versions) >= 4  # the last one may come too late for a token
    assert {read(t, 0) for r in rollouts for t in r.output} == {Reading(0, 0)}
    later = {r.rollout for r in rollouts if any(span.version for span in r.spans)}
    assert later == found.labels.keys() == found.installs.keys()


# ---------------------------------------------------------------- the command


def test_the_command_says_what_was_seen_and_fails_when_something_is_missed(found, filled, monkeypatch, capsys):
    def command(*cells, arguments=()):
        async def given(*_, **__):
            return replace(found, cells=list(cells))

        monkeypatch.setattr(canary_matrix, "matrix", given)
        with pytest.raises(SystemExit) as end:
            main(["canary", *arguments])
        return end.value.code, capsys.readouterr().out

    status, out = command(*filled)
    assert status == 0
    right, wrong = (sum((c.fault == "none") == is_right for c in filled) for is_right in (True, False))
    assert f"{right} of {right} right handlings" in out and f"{wrong} of {wrong} wrong ones" in out
    assert all(f"{fault}: breaks" in out for fault in FAULTS) and "MISS" not in out
    assert "left out: pause wait: this engine has keep, retract, abort" in out and "own label" not in out
    missed = replace(filled[0], good=False)
    status, out = command(missed, filled[-1])
    assert status == 1 and "MISS" in out
    status, out = command(missed, filled[-1], arguments=["--json"])
    printed = json.loads(out)
    assert status == 1 and printed["ok"] is False
    (engine,) = printed["engines"]
    assert engine["cells"][1]["fault"] == "no update" and engine["cells"][1]["guard"].startswith("refused")
    assert command()[0] == 1  # nothing was done, so nothing was seen


def test_a_wrong_label_of_the_library_is_reported_and_fails_nothing(found, filled, monkeypatch, capsys):
    """Real tokens of an update that a request lived through, and a library that counts one token too few."""
    held = next(c for c in filled if c.handling.running == "hold" and c.good and c.fault == "none")
    (first, second), old = held.answers[0].said, held.old
    tokens = [token(run.said) for run in (first, second) for _ in range(run.n)]

    def told(*said):
        running = replace(held.answers[0], own=label(said, tokens, old + 1))
        return replace(held, answers=[running, *held.answers[1:]])

    right = told((old, first.n), (old + 1, second.n))
    late = told((old, first.n - 1), (old + 1, second.n + 1))
    assert (right.own, late.own, held.own) == ("right", "wrong", "")

    async def given(*_, **__):
        return replace(found, cells=[right, late])

    monkeypatch.setattr(canary_matrix, "matrix", given)
    with pytest.raises(SystemExit) as end:
        main(["canary"])
    out = capsys.readouterr().out
    assert end.value.code == 0
    assert "its own labels are right of 1 requests, wrong of 1 (right handlings)" in out
    assert f"own label wrong: says {first.n - 1} of v{old}, {second.n + 1} of v{old + 1}" in out


def test_engines_that_are_missing_are_named(found, filled, monkeypatch, capsys):
    asked = []

    async def given(kind, *_, **__):
        asked.append(kind)
        return replace(found, engine=kind, cells=filled[:1])

    monkeypatch.setattr(canary_matrix, "matrix", given)
    for name in ("VLLM", "SGLANG"):
        monkeypatch.setenv(f"RLSCHED_{name}_PYTHON", "/nowhere/python")

    def command(*arguments):
        asked.clear()
        with pytest.raises(SystemExit) as end:
            main(["canary", *arguments])
        return end.value.code, capsys.readouterr()

    status, told = command("--engine", "transformers", "--engine", "vllm")
    assert (status, asked, told.out) == (2, [], "")
    assert told.err == "rlsched: engine vllm: no /nowhere/python: make engines, or set RLSCHED_VLLM_PYTHON\n"
    status, told = command("--engine", "all", "--json")
    assert (status, asked) == (0, ["transformers"])
    assert json.loads(told.out)["left_out"].keys() == installs.RECIPES.keys() - {"transformers"}
    assert "engine sglang is left out: no /nowhere/python: make engines" in told.err
    monkeypatch.setattr(installs, "engines", lambda: [replace(installs.engine("vllm"), name="vllm")])
    assert command("--engine", "all")[0] == 2


def test_an_audit_is_printed_with_what_contradicts_it(mixed, capsys):
    from rich.console import Console

    found = audit(Reader(mixed).events(), logged(mixed))
    found.labels = {7: [Mismatch(0, 2, Reading(5, 5), Reading(4, 4))]}
    report.audits(Console(width=200), {"areal-async": found})
    out = capsys.readouterr().out
    assert "1 contradict their segments, 0 what was installed" in out
    assert "rollout 7: 2 from token 0 say v4; claimed: v5" in out
