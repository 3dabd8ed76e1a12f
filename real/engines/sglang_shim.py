"""Import stand-ins with which the unmodified SGLang wheel loads where there is no CUDA.

SGLang imports `torchvision`, `triton` and `sgl_kernel` when it is loaded, and calls none of them on its dense CPU path.
This finder makes the ones that are missing importable. It is asked last, so that a package that is really installed
wins; and what would compute something, an operation of `sgl_kernel`, raises when it is called instead of doing nothing.

Importing this module installs the finder. It needs nothing but the standard library, so that a `.pth` file in the
engine's environment can import it in every process.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any

STOOD_IN = frozenset({"torchvision", "triton", "sgl_kernel"})
"""Packages that may be missing."""
VERSION = "3.9.0"
"""What a stand-in says of its version: SGLang compares it with a minimum."""


def private(name: str) -> bool:
    """Names of Python's own protocols, which a stand-in must not pretend to have."""
    return name.startswith("__") and name.endswith("__")


class Kind(type):
    """Classes whose unknown attributes are stand-ins, too."""

    def __getattr__(cls, name: str) -> Any:
        if private(name):
            raise AttributeError(name)
        return Anything()

    def __getitem__(cls, key: Any) -> Any:
        return Anything()


class Anything(metaclass=Kind):
    """Serves as value, decorator, base class, annotation and constant expression at import time."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> Any:
        if len(args) == 1 and not options and callable(args[0]):
            return args[0]  # as a decorator
        return Anything()

    def __getattr__(self, name: str) -> Any:
        if private(name):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, key: Any) -> Any:
        return Anything()

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[type, ...]:
        return (object,)

    def __bool__(self) -> bool:
        return False

    def __or__(self, other: Any) -> Any:
        return Anything()

    def __ror__(self, other: Any) -> Any:
        return Anything()


class Operation(Anything):
    """An operation of `sgl_kernel`: it can be imported and passed around, but not called."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError(f"{self._name} is not installed, and was called on the CPU path")


class Driver:
    """Triton's driver on a machine without a GPU."""

    @property
    def active(self) -> Any:
        """Raises what the real one raises there."""
        raise RuntimeError("0 active drivers ([]). There should only be one.")


class StandIn(types.ModuleType):
    """A missing module."""

    def __getattr__(self, name: str) -> Any:
        if private(name):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full.startswith("sgl_kernel."):
            return Operation(full)
        if full == "triton.runtime.driver":
            return Driver()
        if full in ("triton.runtime", "triton.language"):
            return importlib.import_module(full)
        found: Any = sys.modules.get(full)
        if found is None:
            # Names in capitals are classes, so that isinstance() accepts them.
            found = type(name, (Anything,), {}) if name[0].isupper() else Anything()
        setattr(self, name, found)
        return found


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stand-in for what nobody else has found."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for every module of the packages stood in for."""
        if fullname.split(".")[0] not in STOOD_IN:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        """An empty module."""
        module = StandIn(spec.name)
        module.__path__ = []
        module.__dict__["__version__"] = VERSION
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is to be executed."""


def install() -> None:
    """Ask the finder last, from now on."""
    if not any(isinstance(finder, Finder) for finder in sys.meta_path):
        sys.meta_path.append(Finder())


install()
