"""What a careless integration leaves out of an `EngineServer`, for canary tests only.

It lets a wrong handling happen, so that the tokens show what came of it. What it doesn't refuse: an update outside a
pause, an update that ends with bytes missing, and generation with weights that are not whole. Outside a pause each
bucket is used from the next step on. An abort by name inside a pause takes effect one step too late, as in libraries
that look for cancellations before they stand still, and take a step before they look again.
"""

from __future__ import annotations

from collections.abc import Callable

from .. import answers
from .residence import Residence
from .server import EngineServer


class CarelessResidence(Residence):
    """Anything counts as weights, as long as there is memory under it."""

    def require_usable(self) -> None:
        """Nothing is required."""

    def end_update(self, version: int) -> int:
        """Close the update, whatever arrived."""
        self._updating, self.version, self.usable = None, version, True
        return self._received


class Careless(EngineServer):
    """To be mixed into an engine whose residence is a `CarelessResidence`."""

    _late: tuple[str, ...] = ()

    def _require_pause(self) -> None:
        pass

    def _take(self, copy: Callable[[], int]) -> answers.Moved:
        moved = super()._take(copy)
        if not self._paused:
            self._adopt()
        return moved

    def _abort(self, rollouts: list[str] | None) -> answers.Aborted:
        if not self._paused or rollouts is None:
            return super()._abort(rollouts)
        self._late = tuple(r for r in rollouts if r in self._requests)
        return answers.Aborted(list(self._late))

    def _end_step(self) -> None:
        stepped = self._work is not None
        super()._end_step()
        if stepped and self._late:
            late, self._late = self._late, ()
            super()._abort([r for r in late if r in self._requests])
