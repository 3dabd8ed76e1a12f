"""Naming policies: from an argument or a manifest to a policy and back, and what is said when that fails."""

import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlsched.controller import Controller
from rlsched.decisions import Move
from rlsched.errors import InputError
from rlsched.naming import PolicySpec, SlotSpec, build, parse, spec
from rlsched.policy import SLOTS, areal_async, presets, replace, verl_hybrid
from rlsched.shape import Shape
from rlsched.slots.admit import Barrier, Cap
from rlsched.slots.expire import AgeBound, Never
from rlsched.slots.place import Colocated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import LeastLoaded
from rlsched.slots.select import FirstFinished, InOrder

MINE = '''
"""A user's slots and policies."""

from dataclasses import dataclass

from rlsched.decisions import Wait
from rlsched.policy import areal_async, replace
from rlsched.shape import Promises
from rlsched.slot import Slot
from rlsched.slots.select import FirstFinished


class Freshest(Slot, frozen=True):
    n: int = 1
    names: tuple[str, ...] = ()

    def decide(self, state, ledger):
        return Wait("never")


class Base:
    def start(self, shape, seed):
        return None

    def observe(self, state, event, ledger):
        return state

    def promises(self, shape):
        return Promises()

    def decide(self, state, ledger):
        return Wait("never")


class Plain(Base):
    def __init__(self, n: int = 2, word: str = "a"):
        self.n = n
        self.word = word


@dataclass(frozen=True)
class Data(Base):
    n: int = 3


class Needs(Slot, frozen=True):
    n: int

    def decide(self, state, ledger):
        return Wait("never")


class Mute(Slot, frozen=True):
    pass


class Outer:
    class Inner(Freshest, frozen=True):
        pass


policy = replace(areal_async(), name="mine", select=Freshest(n=4))
instance = Freshest(n=5)
number = 7


def make():
    return replace(policy, name="made")


def boom():
    raise LookupError("no such\\nthing")
'''


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


def refused(argument: str, *settings: str) -> str:
    with pytest.raises(InputError) as caught:
        parse(argument, settings)
    return " ".join(str(caught.value).split())


# ---- names that work


def test_presets_are_found_by_name() -> None:
    assert parse("verl-hybrid") == verl_hybrid()
    assert parse("areal-async") == areal_async()
    assert [*presets()] == ["verl-hybrid", "areal-async"]


def test_a_field_of_a_slot_is_set() -> None:
    policy = parse("areal-async,admit.eta=1")
    assert policy == replace(areal_async(), name="areal-async,admit.eta=1", admit=Cap(eta=1))


def test_settings_add_up_in_their_order() -> None:
    policy = parse("areal-async,admit.eta=1,admit.C=4,publish.fate=restart,publish.flush=false,admit.eta=2")
    assert policy.admit == Cap(eta=2, C=4)
    assert policy.publish == EveryVersion(fate="restart", flush=False)


def test_fates_that_can_not_work_are_one_line() -> None:
    words = "publish.fate is retract, which flushes: leave publish.flush true, or choose keep"
    with pytest.raises(InputError, match=words):
        parse("areal-async,publish.fate=retract,publish.flush=false")
    for fate in ("retract", "keep"):
        policy = parse(f"verl-hybrid,publish.fate={fate}")
        with pytest.raises(InputError, match=rf"publish.fate is {fate}, but place \(Colocated\) lets nothing run"):
            policy.promises(Shape())
        assert parse(f"areal-async,publish.fate={fate}").promises(Shape()).partial == fate
    with pytest.raises(InputError, match="a Move's fate is 'keep': an engine that gives its device away keeps no req"):
        Move(0, "trainer", fate="keep")  # type: ignore[arg-type]


def test_common_settings_come_after_own_ones_and_stay_out_of_the_name() -> None:
    policy = parse("areal-async,admit.eta=1", ["admit.eta=3", "expire=AgeBound", "expire.bound=2"])
    assert policy.name == "areal-async,admit.eta=1"
    assert policy.admit == Cap(eta=3) and policy.expire == AgeBound(bound=2)


def test_spaces_around_a_setting_do_no_harm() -> None:
    assert parse("areal-async, admit.eta=1").admit == Cap(eta=1)


def test_none_gives_an_optional_field_back() -> None:
    for none in ("none", "None", "null"):
        assert parse(f"areal-async,admit.C=3,admit.C={none}").admit == Cap()


def test_lists_may_hold_commas() -> None:
    place = parse('verl-hybrid,place.load=["parameters"],place.offload=[],place.sleep=1').place
    assert place == Colocated(sleep=1, load=("parameters",), offload=())
    place = parse('verl-hybrid,place.offload=["parameters", "optimizer"],admit=Barrier').place
    assert place == Colocated(offload=("parameters", "optimizer"))


def test_a_bare_class_name_is_one_of_rlscheds_slots() -> None:
    policy = parse("areal-async,admit=Barrier,select=InOrder,select.whole=true,expire=Never,route=LeastLoaded")
    assert (policy.admit, policy.select, policy.expire) == (Barrier(), InOrder(whole=True), Never())
    assert policy.route == LeastLoaded()


def test_a_slot_is_named_by_module_and_class() -> None:
    assert parse("areal-async,select=rlsched.slots.select:FirstFinished").select == FirstFinished()


def test_a_module_beside_the_user_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rlsched_test_beside.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)
    path = [*sys.path]
    policy = parse("rlsched_test_beside:make,select=rlsched_test_beside:Freshest,select.n=9")
    assert policy.name == "made,select=rlsched_test_beside:Freshest,select.n=9"
    assert policy.select.n == 9  # type: ignore[attr-defined]
    assert sys.path == path
    assert build(spec(policy)) == policy


@pytest.mark.parametrize(
    ("attribute", "name", "n"), [("policy", "mine", 4), ("make", "made", 4), ("make,select.n=6", "made,select.n=6", 6)]
)
def test_a_policy_of_the_users_file(mine: Path, attribute: str, name: str, n: int) -> None:
    policy = parse(f"{mine}:{attribute}")
    assert policy.name == name
    assert policy.select.n == n  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("attribute", "n"), [("Freshest", 1), ("Plain", 2), ("Data", 3), ("instance", 5), ("Outer.Inner", 1)]
)
def test_a_slot_of_the_users_file_keeps_its_fields_through_a_manifest(mine: Path, attribute: str, n: int) -> None:
    policy = parse(f"areal-async,select={mine}:{attribute}")
    assert policy.select.n == n  # type: ignore[attr-defined]
    policy = parse(f"areal-async,select={mine}:{attribute},select.n=8")
    assert policy.select.n == 8  # type: ignore[attr-defined]
    saved = msgspec.json.decode(msgspec.json.encode(spec(policy)), type=PolicySpec)
    assert saved.slots["select"].type.startswith(f"{mine.resolve()}:")
    again = build(saved)
    assert type(again.select) is type(policy.select)
    assert again.select.n == 8  # type: ignore[attr-defined]
    assert msgspec.json.encode(spec(again)) == msgspec.json.encode(saved)
    Controller(again, Shape())


def test_a_relative_path_is_found_from_elsewhere(mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    saved = spec(parse("areal-async,select=mine.py:Freshest"))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert spec(build(saved)) == saved


@pytest.mark.parametrize(
    "argument",
    [
        "verl-hybrid",
        "areal-async",
        "areal-async,admit.eta=2,admit.C=7,select=InOrder,expire=AgeBound,expire.requeue=true,route=LeastLoaded",
        'verl-hybrid,place.load=["optimizer"],place.offload=[],place.engines=2,publish.bucket_mb=1',
    ],
)
def test_a_policy_survives_its_manifest(argument: str) -> None:
    policy = parse(argument)
    saved = msgspec.json.decode(msgspec.json.encode(spec(policy)), type=PolicySpec)
    assert build(saved) == policy
    assert [*saved.slots] == [*SLOTS]


# ---- names that don't


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("nope", ["unknown policy 'nope'", "verl-hybrid", "areal-async", "path.py:attribute"]),
        ("", ["unknown policy ''", "areal-async"]),
        ("areal-async,", ["areal-async", "slot.field=value"]),
        ("areal-async,admit.eta", ["'admit.eta'", "slot.field=value"]),
        ("areal-async,queue.n=1", ["no slot 'queue'", "admit, select, expire, publish, place, route"]),
        ("areal-async,=1", ["no slot ''", "admit"]),
        ("areal-async,admit.beta=1", ["Cap has no field 'beta'", "eta, C"]),
        ("areal-async,admit.=1", ["Cap has no field ''", "eta, C"]),
        ("verl-hybrid,admit.eta=1", ["Barrier has no field 'eta'", "none"]),
        ("areal-async,admit.eta=lots", ["'admit.eta=lots'", "int", "eta"]),
        ("areal-async,admit.eta=1.5", ["'admit.eta=1.5'", "int", "eta"]),
        ("areal-async,admit.eta=", ["'admit.eta='", "int", "eta"]),
        ("areal-async,admit.eta=[1,2]", ["'admit.eta=[1,2]'", "int", "eta"]),
        ("areal-async,admit.eta=none", ["'admit.eta=none'", "int", "eta"]),
        ("areal-async,publish.transport=pigeon", ["pigeon", "transport"]),
        ("areal-async,publish.flush=perhaps", ["'publish.flush=perhaps'", "bool"]),
        ("verl-hybrid,place.load=[parameters]", ["place.load", "array"]),
        ('verl-hybrid,place.load=["weights"]', ["weights", "load"]),
        ("areal-async,admit.eta=-1", ["admit.eta is -1", "at least 0"]),
        ("areal-async,admit.C=0", ["admit.C is 0", "at least 1"]),
        ("areal-async,publish.bucket_mb=0", ["publish.bucket_mb is 0", "at least 1"]),
        ("areal-async,expire=AgeBound,expire.bound=-1", ["expire.bound is -1", "at least 0"]),
        ("areal-async,place.trainers=0", ["place.trainers is 0", "at least 1"]),
        ("verl-hybrid,place.sleep=3", ["place.sleep is 3", "1 and 2"]),
        ("areal-async,place.engines=0", ["place.engines is 0", "at least 1"]),
        ("verl-hybrid,place.engines=-1", ["place.engines is -1", "at least 1"]),
        ("areal-async,admit=Sieve", ["rlsched.slots.admit", "'Sieve'"]),
        ("areal-async,admit=rlsched.slots.admit:Sieve", ["rlsched.slots.admit", "'Sieve'"]),
        ("areal-async,admit=nowhere.at.all:Sieve", ["nowhere", "ModuleNotFoundError"]),
        ("areal-async,admit=nowhere.py:Sieve", ["nowhere.py", "no such file"]),
        ("areal-async,admit=", ["''"]),
        ("areal-async,admit=:", ["''"]),
        ("nowhere.py:policy", ["nowhere.py", "no such file"]),
        ("nowhere.at.all:policy", ["nowhere", "ModuleNotFoundError"]),
        ("rlsched.policy:nope", ["rlsched.policy", "'nope'"]),
        ("rlsched.policy:SLOTS", ["tuple", "not a rlsched Policy"]),
        ("areal-async,admit=os:path", ["admit=os:path"]),
        ("areal-async,admit=builtins:int", ["int has no start()", "rlsched.slot.Slot"]),
    ],
)
def test_a_bad_name_is_refused_with_its_place_and_its_mend(argument: str, words: list[str]) -> None:
    message = refused(argument)
    assert all(word in message for word in words), message


def test_a_bad_common_setting_is_refused_like_an_own_one() -> None:
    assert "admit.eta is -1" in refused("areal-async", "admit.eta=-1")
    assert "no slot 'queue'" in refused("areal-async", "queue.n=1")


@pytest.mark.parametrize(
    ("attribute", "words"),
    [
        ("nothing", ["no 'nothing'"]),
        ("number", ["int", "not a rlsched Policy"]),
        ("boom", ["calling it raised LookupError: no such thing"]),
        ("Freshest", ["not a rlsched Policy"]),
        ("", ["no ''"]),
    ],
)
def test_an_attribute_of_the_users_file_that_is_no_policy(mine: Path, attribute: str, words: list[str]) -> None:
    message = refused(f"{mine}:{attribute}")
    assert str(mine) in message and all(word in message for word in words), message


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("Nothing", ["no 'Nothing'"]),
        ("Mute", ["Mute has no decide()", "rlsched.slot.Slot"]),
        ("Needs", ["missing", "`n`"]),
        ("number", ["int has no start()"]),
        ("make", ["has no start()"]),
        ("Freshest,select.m=1", ["Freshest has no field 'm'", "n, names"]),
        ("Freshest,select.n=x", ["select.n=x", "int"]),
        ("Plain,select.m=1", ["Plain has no field 'm'", "n, word"]),
    ],
)
def test_a_class_of_the_users_file_that_is_no_slot(mine: Path, setting: str, words: list[str]) -> None:
    message = refused(f"areal-async,select={mine}:{setting}")
    assert "select" in message and all(word in message for word in words), message


def test_a_place_slot_without_layout_is_refused(mine: Path) -> None:
    assert "has no layout()" in refused(f"areal-async,place={mine}:Freshest")
    assert "has no layout()" in refused("areal-async,place=rlsched.slots.route:RoundRobin")


def test_a_policy_whose_slot_is_no_slot_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text("from rlsched.policy import areal_async, replace\nodd = replace(areal_async(), admit=5)\n")
    assert "admit" in refused(f"{path}:odd")


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("def :", ["SyntaxError"]),
        ("import no_such_module_anywhere", ["ModuleNotFoundError", "no_such_module_anywhere"]),
        ("raise ValueError('no\\nluck')", ["ValueError: no luck"]),
        ("raise SystemExit(3)", ["SystemExit"]),
        ("\0", ["importing it raised"]),
    ],
)
def test_a_file_that_raises_at_import_is_refused(tmp_path: Path, source: str, words: list[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text(source)
    for _ in "twice":
        message = refused(f"{path}:policy")
        assert message.startswith(f"{path}: importing it raised"), message
        assert all(word in message for word in words), message


def altered(saved: PolicySpec, slot: str, **changes: Any) -> PolicySpec:
    return replace(saved, slots={**saved.slots, slot: replace(saved.slots[slot], **changes)})


def test_a_manifest_that_names_what_is_not_there_is_refused(mine: Path) -> None:
    saved = spec(parse(f"areal-async,select={mine}:Freshest"))
    for broken, words in (
        (altered(saved, "admit", type="rlsched.slots.admit:Gone"), "'Gone'"),
        (altered(saved, "admit", type="rlsched.slots.gone:Cap"), "rlsched.slots.gone"),
        (altered(saved, "select", type=f"{mine.parent / 'gone.py'}:Freshest"), "no such file"),
        (altered(saved, "admit", fields={"eta": 0, "beta": 1}), "slot admit"),
        (altered(saved, "admit", fields={"eta": "x"}), "slot admit"),
        (altered(saved, "admit", fields={"eta": -1}), "admit.eta is -1"),
        (PolicySpec("short", {"admit": saved.slots["admit"]}), "names the slots admit"),
        (PolicySpec("more", {**saved.slots, "extra": SlotSpec("rlsched.slots.admit:Cap")}), "extra"),
    ):
        with pytest.raises(InputError, match=words):
            build(broken)
