"""What of the model is in this engine's memory: which parts are awake, which version, and whether it is whole.

The rules that keep an engine from generating with weights that are not weights: after a level 2 sleep, or from the
first byte of an update to its last, they are unusable, and only a complete update makes them usable again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .. import cuda
from ..memory import Droppable, Parked, held, trim
from ..weights import WeightSet
from ..wire import Refused

PARTS = ("kv", "weights")
"""What can sleep, in the order of levels: level 1 loses the first, level 2 both."""


class Memory(Protocol):
    """What holds an engine's parts."""

    def drop(self, parts: Sequence[str]) -> None:
        """Give these parts' memory back; the contents are lost."""

    def take(self, parts: Sequence[str]) -> None:
        """Take it again; KV is empty then."""

    def forget_kv(self) -> None:
        """Forget all cached KV; no request stands on it."""


class OwnMemory:
    """Parts that are tensors of this process: parameters, and one cache of transformers' continuous batching."""

    def __init__(self, weights: WeightSet, cache: Any) -> None:
        self._cache = cache
        self._device = weights.device
        self._parked = Parked(weights.parameters.values())
        self._storages = {"weights": Droppable(weights.parameters.values()), "kv": Droppable([cache.cache_tensor])}

    def drop(self, parts: Sequence[str]) -> None:
        """Give these parts' memory back. Weights that are not among them leave a GPU for the host."""
        cuda.settle(self._device)
        for part in parts:
            self._storages[part].drop()
        if cuda.on_gpu(self._device) and "weights" not in parts:
            self._parked.drop()
        trim()

    def take(self, parts: Sequence[str]) -> None:
        """Take it again."""
        for part in parts:
            if part == "weights" and self._parked.parked:
                self._parked.take()
            else:
                self._storages[part].take()
        cuda.settle(self._device)
        if "kv" in parts:
            self.forget_kv()

    def forget_kv(self) -> None:
        """Forget all cached KV."""
        self._cache.reset()


class Residence:
    """Weights and KV of one engine. `levels`: of sleep, that it can do; `parks`: level 1 moves the weights to the host.

    Parked weights are asleep, but not lost: they are usable as soon as they are awake.
    """

    def __init__(self, weights: WeightSet, memory: Memory, levels: tuple[int, ...], parks: bool = False) -> None:
        self.levels = levels
        self._parks = parks
        self.asleep: set[str] = set()
        self._weights = weights
        self._memory = memory
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
        return sorted(set(PARTS) - self.asleep)

    def require_usable(self) -> None:
        """Raise `Refused` unless the engine may generate."""
        if self.asleep:
            raise Refused(f"asleep: {', '.join(sorted(self.asleep))}")
        if not self.usable:
            raise Refused("the weights are not whole: they need a complete update")

    # ------------------------------------------------------------ memory

    def sleep(self, level: int) -> tuple[int, int]:
        """Drop KV, at level 2 weights as well; bytes in use before and after (`memory.held`)."""
        if level not in self.levels:
            raise Refused(f"no sleep level {level}")
        if self.asleep:
            raise Refused("asleep already")
        device = self._weights.device
        before = held(device)
        parts = PARTS[:level]
        self._memory.drop(parts)
        self.asleep.update(PARTS if self._parks else parts)
        self.usable = self.usable and level == 1
        return before, held(device)

    def wake(self, tags: list[str]) -> None:
        """Take the memory of these parts again; of those that are awake nothing changes."""
        unknown = set(tags) - set(PARTS)
        if unknown:
            raise Refused(f"no such tag: {', '.join(sorted(unknown))}")
        parts = sorted(self.asleep & set(tags))
        if parts:
            self._memory.take(parts)
        self.asleep.difference_update(parts)

    def drop_kv(self) -> None:
        """Forget all cached KV; no request may stand on it."""
        if "kv" not in self.asleep:
            self._memory.forget_kv()

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
