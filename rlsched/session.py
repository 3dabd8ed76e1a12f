"""A session: a controller with its history. Every world posts its facts here and executes the answer."""

from collections.abc import Callable

from .commands import Command
from .controller import Controller
from .facts import AnyFact, End
from .history import Line
from .notes import Note


class Session:
    """Passes facts to ``controller`` and everything to ``record``, in the order of the history.

    All commands of one fact are recorded before the first is executed.
    """

    def __init__(self, controller: Controller, record: Callable[[Line], None]) -> None:
        self.controller = controller
        self.ended: End | None = None
        self._record = record

    def post(self, fact: AnyFact) -> list[Command | Note]:
        """Record ``fact`` and what follows from it, which is for the world to execute."""
        if self.ended is not None:
            return []
        self._record(fact)
        if isinstance(fact, End):
            self.ended = fact
            return []
        out = self.controller.handle(fact)
        for line in out:
            self._record(line)
        return out
