"""Replay: feed a recorded history's facts to a fresh controller and demand the recorded answers."""

from collections.abc import Iterable

from msgspec import Struct

from .commands import Command
from .controller import Controller
from .errors import PolicyError
from .facts import End, Fact
from .history import Event, Line, Reader
from .naming import build
from .notes import Note


class Divergence(Struct, frozen=True):
    """Where the controller answered otherwise than the history. ``line`` counts from 1 (the manifest)."""

    line: int
    recorded: str
    replayed: str


class Replay(Struct, frozen=True):
    """What a replay found. ``facts`` and ``answers`` were consumed; all of them unless it diverged."""

    facts: int
    answers: int
    divergence: Divergence | None


def replay(reader: Reader) -> Replay:
    """Replay the whole history behind ``reader``."""
    manifest = reader.manifest
    controller = Controller(build(manifest.policy), manifest.shape, manifest.seed)
    return compare(controller, reader.events())


def compare(controller: Controller, events: Iterable[Event]) -> Replay:
    """Feed the facts among ``events`` to ``controller`` and compare its answers with the others, in order.

    Answers may be missing only after the last fact of an open history, where the run was cut.
    """
    due: list[Line] = []
    facts = answers = 0
    for line, event in enumerate(events, start=2):
        if isinstance(event, Fact):
            if due:
                return Replay(facts, answers, Divergence(line, repr(event), repr(due[0])))
            facts += 1
            if isinstance(event, End):
                continue
            try:
                due = list(controller.handle(event))
            except PolicyError as error:
                return Replay(facts, answers, Divergence(line, repr(event), str(error)))
        elif isinstance(event, Command | Note):
            if not due or due[0] != event:
                return Replay(facts, answers, Divergence(line, repr(event), repr(due[0]) if due else "nothing"))
            due.pop(0)
            answers += 1
    return Replay(facts, answers, None)
