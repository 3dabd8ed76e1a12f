"""The embedded engine without its guards: it does what it is told, and shares KV blocks as the library does.

For canary tests only: it lets a wrong handling happen, so that the tokens show what came of it. What it doesn't
refuse: an update outside a pause, an update that ends with bytes missing, and generation with weights that are not
whole. An abort by name inside a pause acts as the library's own `cancel_request` there, one step too late.

Run as `python -m rlsched.real.engines.bare --fd N --parent PID`.
"""

from __future__ import annotations

from .. import answers
from .entry import run
from .residence import Residence
from .transformers import TransformersEngine, main


class BareResidence(Residence):
    """Anything counts as weights, as long as there is memory under it."""

    def require_usable(self) -> None:
        """Nothing is required."""

    def end_update(self, version: int) -> int:
        """Close the update, whatever arrived."""
        self._updating, self.version, self.usable = None, version, True
        return self._received


class BareEngine(TransformersEngine):
    """An engine as a careless integration has it."""

    residence = BareResidence
    sharing = True
    _late: tuple[str, ...] = ()

    def _require_pause(self) -> None:
        pass

    def _abort(self, rollouts: list[str] | None) -> answers.Aborted:
        if not self._paused or rollouts is None:
            return super()._abort(rollouts)
        # The library's loop has looked for cancellations before it stood still, and takes a step before it looks again.
        self._late = tuple(r for r in rollouts if r in self._requests)
        return answers.Aborted(list(self._late))

    def _end_step(self) -> None:
        stepped = self._work is not None
        super()._end_step()
        if stepped and self._late:
            late, self._late = self._late, ()
            super()._abort([r for r in late if r in self._requests])


if __name__ == "__main__":
    run(lambda: main(BareEngine))
