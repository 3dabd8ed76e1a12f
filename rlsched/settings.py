"""Settings from TOML: a file on top of defaults, and changes on top of both."""

import tomllib
from collections.abc import Iterable
from math import isfinite
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from .errors import InputError

S = TypeVar("S", bound=Struct)


def load(default: S, path: Path | str | None, changes: Iterable[str] = ()) -> S:
    """``default`` with what a TOML file (None: none) and ``table.field=value`` changes say otherwise.

    Raises InputError that names the file and the field.
    """
    raw = {} if path is None else _read(path)
    try:
        for change in changes:
            _change(raw, change)
        _finite(raw, "")
        return msgspec.convert(_merge(msgspec.to_builtins(default), raw), type(default))
    except (msgspec.ValidationError, InputError) as error:
        raise InputError(f"{path or type(default).__name__.lower()}: {error}") from None


def _finite(value: Any, name: str) -> None:
    """Refuse nan, which passes every comparison, and infinite numbers."""
    if isinstance(value, dict):
        for key, inner in value.items():
            _finite(inner, f"{name}{key}." if isinstance(inner, dict) else name + key)
    elif isinstance(value, float) and not isfinite(value):
        raise InputError(f"{name} is {value}: it must be a finite number")


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """``over`` on top of ``base``, table by table: what a file leaves out keeps its default."""
    both = dict(base)
    for key, value in over.items():
        old = base.get(key)
        both[key] = _merge(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return both


def _change(raw: dict[str, Any], change: str) -> None:
    key, equals, value = change.partition("=")
    *tables, field = key.split(".")
    if not equals or not tables:
        raise InputError(f"{change!r}: write table.field=value, as in shape.b=16")
    try:
        parsed = msgspec.json.decode(value)
    except msgspec.DecodeError:
        parsed = value
    for table in tables:
        raw = raw.setdefault(table, {})
        if not isinstance(raw, dict):
            raise InputError(f"{change!r}: {table} is no table but {raw!r}")
    raw[field] = parsed


def _read(path: Path | str) -> dict[str, Any]:
    try:
        with Path(path).open("rb") as file:
            return tomllib.load(file)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: {error}") from None
