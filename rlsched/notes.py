"""Notes: decisions of a controller that change its own books. Recorded and replayed, never executed."""

from typing import Literal

from msgspec import Struct

Kind = Literal["train", "eval"]


class Note(Struct, frozen=True, tag_field="ev", omit_defaults=True, forbid_unknown_fields=True):
    """Base of all notes."""


class Admit(Note, frozen=True, tag="admit"):
    """Group ``group`` may run. Ids are ordinals: the place in admission order, from 0.

    Its rollouts are ``first … first + launch_n - 1``; ``need_n`` of them make it whole.
    ``version`` is the published one.
    """

    group: int
    prompt: int
    version: int
    need_n: int
    launch_n: int
    first: int
    attempt: int = 0
    tags: list[str] = []
    kind: Kind = "train"


class Accept(Note, frozen=True, tag="accept"):
    """The group is whole and kept for training."""

    group: int


class Reject(Note, frozen=True, tag="reject"):
    """The group failed, or a filter refused it; its place under the cap is free again."""

    group: int
    why: str


class Drop(Note, frozen=True, tag="drop"):
    """A whole group won't be trained. ``requeue``: its prompt gets another attempt."""

    group: int
    why: str
    requeue: bool = False


class Cancel(Note, frozen=True, tag="cancel"):
    """A running group was given up. ``requeue``: its prompt gets another attempt."""

    group: int
    why: str
    requeue: bool = False


class Publish(Note, frozen=True, tag="publish"):
    """``version`` is what rollouts start under from now on: ``engines`` hold it whole."""

    version: int
    engines: list[int]


class Wait(Note, frozen=True, tag="wait"):
    """``who`` can't go on because of ``on``."""

    who: str
    on: str


class Go(Note, frozen=True, tag="go"):
    """``who`` goes on."""

    who: str


AnyNote = Admit | Accept | Reject | Drop | Cancel | Publish | Wait | Go
