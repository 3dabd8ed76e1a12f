"""What of the model is in this engine's memory: which parts are awake, which version, and whether it is whole.

The rules that keep an engine from generating with weights that are not weights: after a level 2 sleep, or from the
first byte of an update to its last, they are unusable, and only a complete update makes them usable again.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..memory import Droppable, resident, trim
from ..weights import WeightSet
from ..wire import Refused


class Residence:
    """Weights and KV of one engine."""

    def __init__(self, weights: WeightSet, cache: Any, levels: tuple[int, ...]) -> None:
        tensors: Tensor = cache.cache_tensor
        self.levels = levels
        self.asleep: set[str] = set()
        self._weights = weights
        self._cache = cache
        self._storages = {"weights": Droppable(weights.parameters.values()), "kv": Droppable([tensors])}
        self.forget()

    def forget(self) -> None:
        """Whole weights of version 0 are in place."""
        self.version = 0
        self.usable = True
        self._updating: int | None = None
        self._received = 0

    @property
    def awake(self) -> list[str]:
        """Parts in memory."""
        return sorted(set(self._storages) - self.asleep)

    def require_usable(self) -> None:
        """Raise `Refused` unless the engine may generate."""
        if self.asleep:
            raise Refused(f"asleep: {', '.join(sorted(self.asleep))}")
        if not self.usable:
            raise Refused("the weights are not whole: they need a complete update")

    # ------------------------------------------------------------ memory

    def sleep(self, level: int) -> tuple[int, int]:
        """Drop KV, at level 2 weights as well; bytes of memory before and after."""
        if level not in self.levels:
            raise Refused(f"no sleep level {level}")
        if self.asleep:
            raise Refused("asleep already")
        before = resident()
        for tag in ("kv",) if level == 1 else ("kv", "weights"):
            self._storages[tag].drop()
            self.asleep.add(tag)
        self.usable = self.usable and level == 1
        trim()
        return before, resident()

    def wake(self, tags: list[str]) -> None:
        """Take the memory of these parts again; of those that are awake nothing changes."""
        unknown = set(tags) - set(self._storages)
        if unknown:
            raise Refused(f"no such tag: {', '.join(sorted(unknown))}")
        for tag in sorted(self.asleep & set(tags)):
            self._storages[tag].take()
            self.asleep.discard(tag)
            if tag == "kv":
                self._cache.reset()

    def drop_kv(self) -> None:
        """Forget all cached KV; no request may stand on it."""
        if "kv" not in self.asleep:
            self._cache.reset()

    # ------------------------------------------------------------ updates

    def begin_update(self, version: int) -> None:
        """Open an update; one that was open before is forgotten."""
        if "weights" in self.asleep:
            raise Refused("the weights are asleep")
        self._updating, self._received, self.usable = version, 0, False

    def require_update(self) -> None:
        """Raise `Refused` unless an update is open."""
        if self._updating is None:
            raise Refused("no update is under way")

    def received(self, size: int) -> None:
        """So many bytes of parameters have been copied."""
        self._received += size

    def end_update(self, version: int) -> int:
        """Close the update; its bytes."""
        self.require_update()
        if version != self._updating:
            raise Refused(f"the update under way is to version {self._updating}, not {version}")
        if self._received != self._weights.nbytes:
            raise Refused(f"{self._received} of {self._weights.nbytes} bytes arrived")
        self._updating, self.version, self.usable = None, version, True
        return self._received

    def checksum(self) -> str:
        """Digest of the weights; empty while they are asleep."""
        return "" if "weights" in self.asleep else self._weights.checksum()
