"""The engine child's own copy of the weights: where transfers land, while the library has its own in another process.

A transfer comes bucket by bucket, bit for bit, as it does to the embedded engine. Only a complete one goes on into the
library.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..model import ModelSpec, build, fill
from ..weights import WeightSet
from .residence import Residence


class Elsewhere:
    """Memory of other processes, which the driver asks to drop and take it."""

    def drop(self, parts: Sequence[str]) -> None:
        """Nothing of it is in this process."""

    def take(self, parts: Sequence[str]) -> None:
        """Nothing of it is in this process."""

    def forget_kv(self) -> None:
        """Nothing of it is in this process."""


class Landing(Residence):
    """Weights of one engine, with the rules that every engine's have."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.model: Any = build(spec)
        self.weights = WeightSet(self.model)
        super().__init__(self.weights, Elsewhere(), (1, 2))

    def forget(self) -> None:
        """Whole weights of version 0 are in place."""
        fill(self.model, self._spec)
        self._came()
        super().forget()

    def begin_update(self, version: int) -> None:
        """Open an update; one that was open before is forgotten."""
        super().begin_update(version)
        self._came()

    def _came(self) -> None:
        self.transports: set[str] = set()
        """What has brought the update's buckets, as `Capabilities` calls it."""
        self.files: set[Path] = set()
        """Checkpoints that they were read from."""

    def comes(self, transport: str, file: Path | None = None) -> None:
        """A bucket is about to come."""
        self.transports.add(transport)
        if file is not None:
            self.files.add(file)
