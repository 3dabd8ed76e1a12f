"""Stages: the steps of a track, as data, so that a checkpoint can hold a half-finished one.

A track is a sequence of stages. A stage issues its commands together when it is entered and is
over when all of them are answered and its condition holds. What each does is in ``tracks``.
"""

from msgspec import Struct
from msgspec.structs import replace

from .commands import AbortFate, Part, Tag


class Stage(Struct, frozen=True, tag=str.lower, forbid_unknown_fields=True):
    """Base of all stages."""


class Interrupt(Stage, frozen=True):
    """Close ``engines`` to new requests and abort what runs there."""

    engines: list[int]
    fate: AbortFate


class Drain(Stage, frozen=True):
    """Close ``engines`` to new requests and wait until nothing runs there."""

    engines: list[int]


class Still(Stage, frozen=True):
    """Pause ``engines``, which closes them to new requests."""

    engines: list[int]


class Reopen(Stage, frozen=True):
    """Resume the paused of ``engines`` and let them take requests again."""

    engines: list[int]


class PutToSleep(Stage, frozen=True):
    """Free the memory of ``engines``."""

    engines: list[int]
    level: int


class WakeUp(Stage, frozen=True):
    """Allocate ``tags`` on ``engines``."""

    engines: list[int]
    tags: list[Tag]


class Bring(Stage, frozen=True):
    """Load trainer ``parts``."""

    parts: list[Part]


class PutAway(Stage, frozen=True):
    """Offload trainer ``parts``."""

    parts: list[Part]


class Hand(Stage, frozen=True):
    """From here on the trainer (or else the engine) holds ``devices``."""

    devices: list[int]
    to_trainer: bool


class TrainBatch(Stage, frozen=True):
    """Train the selected batch."""


class Send(Stage, frozen=True):
    """Transfer the update that is on its way."""


class FlushCaches(Stage, frozen=True):
    """Flush the KV caches of ``engines``; under ``recompute`` with requests inside."""

    engines: list[int]
    recompute: bool = False


class Announce(Stage, frozen=True):
    """Publish the version that was installed."""


class Settle(Stage, frozen=True):
    """Wait until every command is answered; timers don't count."""


class Farewell(Stage, frozen=True):
    """Stop the run."""


AnyStage = (
    Interrupt
    | Drain
    | Still
    | Reopen
    | PutToSleep
    | WakeUp
    | Bring
    | PutAway
    | Hand
    | TrainBatch
    | Send
    | FlushCaches
    | Announce
    | Settle
    | Farewell
)


class Track(Struct):
    """A sequence of stages under way. ``awaiting`` holds the unanswered commands of the first one."""

    stages: list[AnyStage]
    entered: bool = False
    awaiting: set[int] = set()


def without(stage: AnyStage, engine: int) -> AnyStage:
    """The same stage, but for an engine that went down. Should it come up again, it is not meant any more."""
    engines = getattr(stage, "engines", ())
    return replace(stage, engines=[e for e in engines if e != engine]) if engine in engines else stage
