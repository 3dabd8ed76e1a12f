"""Decisions: what the slots of a policy answer."""

from typing import Literal

from msgspec import Struct

from .commands import Part, Transport
from .errors import InputError
from .notes import Kind
from .shape import Fate


class Start(Struct, frozen=True):
    """Admit ``prompt``: ``need_n`` samples make the group whole, ``launch_n ≥ need_n`` are started.

    ``queue`` names where the prompt was waiting, if it was.
    """

    prompt: int
    need_n: int
    launch_n: int
    tags: tuple[str, ...] = ()
    queue: str = "retry"
    kind: Kind = "train"


class Batch(Struct, frozen=True):
    """Train ``groups`` as batch ``index`` of the version in the making; ``last`` closes the version."""

    groups: list[int]
    index: int
    last: bool


class Wait(Struct, frozen=True):
    """Nothing can be selected yet. ``until``: ask again at that nanosecond, without a fact."""

    why: str
    until: int | None = None


class Verdict(Struct, frozen=True):
    """What becomes of a group, running or accepted; one without a verdict is kept.

    ``drop`` gives it up, ``requeue`` puts its prompt into ``queue`` for another attempt. ``park``
    calls a running group's rollouts back with their tokens, to go on after the next publish.
    ``refund`` gives an accepted group's place under the cap back.
    """

    group: int
    fate: Literal["drop", "requeue", "park"]
    why: str
    refund: bool = True
    queue: str = "retry"


class Install(Struct, frozen=True):
    """Bring ``version``, the trained one, to ``engines``, in buckets of at most ``bucket`` bytes.

    An engine that comes up amid the making of the next version wants it, too. ``fate`` is that of
    running requests:

    * ``drain`` waits for them;
    * ``resume`` aborts them and sends prompt and tokens so far again;
    * ``restart`` aborts them and throws the tokens away;
    * ``retract`` leaves them in the engine, where they go back to the queue and compute their KV anew
      (vLLM: ``pause_generation(mode="keep", clear_cache=True)``, SGLang: ``pause_generation`` ``retract``);
    * ``keep`` lets them stand still and go on with the KV that they have (vLLM: ``mode="keep",
      clear_cache=False``, SGLang: ``in_place``).

    ``flush`` forgets all cached KV. ``retract`` can't do without. Under ``keep`` no engine can flush,
    for all refuse to while requests hold KV; there it promises that a request's KV is never older than
    the request, which holds as long as engines share none among requests.
    The version is published once ``quorum`` of the serving engines hold it (None: all of them).
    """

    version: int
    engines: list[int]
    transport: Transport = "broadcast"
    bucket: int = 1024 * 2**20
    fate: Fate = "resume"
    flush: bool = True
    quorum: int | None = None


class Move(Struct, frozen=True):
    """Give ``device`` to ``holder``. The engine there sleeps at level ``sleep`` while the trainer has it.

    ``load`` is brought to it before training; ``offload`` leaves it again: the first part before
    the weights wake up, the rest before the KV cache does. ``fate`` is that of running requests: none can
    stay in an engine that sleeps. Raises InputError for ``retract`` and ``keep``.
    """

    device: int
    holder: Literal["engine", "trainer"]
    sleep: int = 2
    load: tuple[Part, ...] = ("parameters", "optimizer")
    offload: tuple[Part, ...] = ("optimizer", "parameters")
    fate: Literal["resume", "restart", "drain"] = "drain"

    def __post_init__(self) -> None:
        if self.fate in ("retract", "keep"):
            raise InputError(
                f"a Move's fate is {self.fate!r}: an engine that gives its device away keeps no request;"
                " choose drain, resume or restart"
            )


class Hold(Struct, frozen=True):
    """No engine for this rollout yet."""

    why: str = ""
