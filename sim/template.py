"""The default scenario as commented TOML, made from the fields and their docstrings."""

import ast
import inspect
from textwrap import fill
from typing import Any

from msgspec import Struct

from .scenario import Scenario


def template() -> str:
    """TOML text that ``load`` reads back to the default scenario."""
    lines = ["# The default scenario. What a file leaves out keeps the value that stands here."]
    for name in Scenario.__struct_fields__:
        lines += ["", *_table(name, getattr(Scenario(), name))]
    return "\n".join(lines) + "\n"


def _table(name: str, struct: Struct) -> list[str]:
    lines, nested = [f"[{name}]"], []
    for field, doc in _documented(type(struct)).items():
        value = getattr(struct, field)
        if isinstance(value, Struct):
            nested += ["", *_comment(doc), *_table(f"{name}.{field}", value)]
        else:
            lines += _comment(doc)
            lines.append(f"# {field} =" if value is None else f"{field} = {_toml(value)}")
    return [*lines, *nested]


def _comment(doc: str) -> list[str]:
    return fill(" ".join(doc.split()), 100, initial_indent="# ", subsequent_indent="# ").splitlines()


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _documented(kind: type) -> dict[str, str]:
    """Each field with the string that follows it in the source."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    last = ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
            found[last] = ""
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and last:
            found[last] = str(node.value.value)
    return found
