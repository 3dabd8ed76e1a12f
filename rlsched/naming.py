"""Naming a policy: from a command-line argument or a manifest to a ``Policy``, and back.

areal-async,admit.eta=1            a preset with a field of one slot changed
areal-async,select=mine.py:Freshest,select.n=2
                                   a slot replaced by a class of the user's
mine.py:policy   package.mod:make  a policy, or a function that makes one
"""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from .errors import InputError
from .policy import SLOTS, Policy, presets


class SlotSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How to make a slot again: where its class is, and its fields."""

    type: str
    fields: dict[str, Any] = {}


class PolicySpec(Struct, frozen=True, forbid_unknown_fields=True):
    """How to make a policy again."""

    name: str
    slots: dict[str, SlotSpec]


def parse(argument: str, settings: Iterable[str] = ()) -> Policy:
    """The policy that ``argument`` names, with its own and then the common ``settings`` applied.

    Raises InputError when a name, slot, field or value is unknown or can't work.
    """
    name, *own = _split(argument)
    policy = _named(name)
    for setting in (*own, *settings):
        policy = _set(policy, setting)
    return replace(policy, name=",".join([policy.name, *own]))


def spec(policy: Policy) -> PolicySpec:
    """How to make ``policy`` again."""
    slots = {n: SlotSpec(_where(type(s)), policy.ask(n, _fields, s)) for n, s in policy.slots()}
    return PolicySpec(policy.name, slots)


def build(saved: PolicySpec) -> Policy:
    """The policy of a manifest."""
    slots = {n: _make(_load(s.type, n), s.fields, f"policy {saved.name}, slot {n}", n) for n, s in saved.slots.items()}
    if {*slots} != {*SLOTS}:
        raise InputError(f"policy {saved.name}: the manifest names the slots {', '.join(slots)}")
    return Policy(saved.name, **slots)


def _named(name: str) -> Policy:
    known = presets()
    if name in known:
        return known[name]
    if ":" not in name:
        raise InputError(f"unknown policy {name!r}: choose {', '.join(known)}, or name your own as path.py:attribute")
    found = _load(name, None)
    if callable(found) and not isinstance(found, Policy):
        try:
            found = found()
        except (Exception, SystemExit) as error:
            raise InputError(f"policy {name}: calling it raised {type(error).__name__}: {error}") from error
    if not isinstance(found, Policy):
        raise InputError(f"policy {name}: it is a {type(found).__name__}, not a rlsched Policy")
    for slot, made in found.slots():
        _whole(made, slot, f"policy {name}, slot {slot}")
    return found


def _set(policy: Policy, setting: str) -> Policy:
    key, equals, value = setting.partition("=")
    slot, dot, field = key.partition(".")
    where = f"policy {policy.name}, {setting!r}"
    if not equals:
        raise InputError(f"{where}: write slot.field=value or slot=module:Class")
    if slot not in SLOTS:
        raise InputError(f"{where}: no slot {slot!r}; the slots are {', '.join(SLOTS)}")
    old = getattr(policy, slot)
    if not dot:
        try:
            found = _load(value, slot)
        except InputError as error:
            raise InputError(f"{where}: {error}") from error
        return replace(policy, **{slot: _make(found, {}, where, slot)})
    fields = _fields(old)
    if field not in fields:
        known = ", ".join(fields) or "none"
        raise InputError(f"{where}: {type(old).__name__} has no field {field!r}; its fields are: {known}")
    return replace(policy, **{slot: _make(type(old), {**fields, field: _value(value)}, where, slot)})


def _split(argument: str) -> list[str]:
    """Split at commas that are not within brackets."""
    parts, depth = [""], 0
    for c in argument:
        depth += (c in "[({") - (c in "])}")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return [p.strip() for p in parts]


def _value(text: str) -> Any:
    if text.lower() == "none":
        return None
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError:
        return text


def _fields(slot: object) -> dict[str, Any]:
    if isinstance(slot, Struct):
        names = [*slot.__struct_fields__]
    else:
        names = [p for p in inspect.signature(type(slot)).parameters if hasattr(slot, p)]
    built: dict[str, Any] = msgspec.to_builtins({name: getattr(slot, name) for name in names})
    return built


def _make(kind: Any, fields: dict[str, Any], where: str, slot: str) -> Any:
    """Slot ``slot`` of class ``kind``. An instance stands for its class and fields."""
    if not isinstance(kind, type):
        _whole(kind, slot, where)
        fields, kind = {**_fields(kind), **fields}, type(kind)
    try:
        if issubclass(kind, Struct) or hasattr(kind, "__dataclass_fields__"):
            made = msgspec.convert(fields, kind, strict=False)
        else:
            made = kind(**fields)
    except Exception as error:
        raise InputError(f"{where}: {error}") from error
    _whole(made, slot, where)
    return made


def _whole(made: object, slot: str, where: str) -> None:
    """See to it that a slot has its methods."""
    methods = ("start", "observe", "promises", "decide", *(("layout",) if slot == "place" else ()))
    missing = [m for m in methods if not callable(getattr(made, m, None))]
    if missing:
        raise InputError(f"{where}: {type(made).__name__} has no {missing[0]}(); derive it from rlsched.slot.Slot")


def _load(target: str, slot: str | None) -> Any:
    """The object at ``path.py:attribute`` or ``module:attribute``; a bare name is one of rlsched's slots."""
    place, _, attribute = target.rpartition(":")
    if not place and slot is not None:
        place = f"rlsched.slots.{slot}"
    module = _file(place) if place.endswith(".py") else _module(place)
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise InputError(f"{target}: {place} has no {attribute!r}") from None
    return found


def _file(place: str) -> ModuleType:
    path = Path(place).resolve()
    if not path.is_file():
        raise InputError(f"{place}: no such file")
    name = f"rlsched_user_{path.stem}_{sha256(bytes(path)).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    module.__dict__["__rlsched_path__"] = str(path)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise InputError(f"{place}: importing it raised {type(error).__name__}: {error}") from error
    return module


def _module(place: str) -> ModuleType:
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        return importlib.import_module(place)
    except (Exception, SystemExit) as error:
        raise InputError(f"{place}: importing it raised {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(here)


def _where(kind: type) -> str:
    path = getattr(sys.modules.get(kind.__module__), "__rlsched_path__", kind.__module__)
    return f"{path}:{kind.__qualname__}"
