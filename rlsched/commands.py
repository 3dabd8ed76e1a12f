"""Commands: what a controller wants done. A world executes them, in the order given.

Every command has an ``id`` (1, 2, …) and is answered by ``Done`` with that id, or by its engine's
``Down``; ``Stop`` is answered by ``End``. A command has no time of its own: it is issued at the
time of the fact above it in the history, and acts later.
"""

from typing import Literal

from msgspec import Struct

Part = Literal["parameters", "optimizer"]
Tag = Literal["weights", "kv"]
Transport = Literal["ipc", "broadcast", "disk"]
AbortFate = Literal["resume", "restart", "cancel"]


class Command(Struct, frozen=True, tag_field="ev", omit_defaults=True, forbid_unknown_fields=True):
    """Base of all commands."""

    id: int


class Work(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """One rollout to generate: sample ``sample`` of attempt ``attempt`` at ``prompt``.

    ``have`` tokens of it exist already and are sent along with the prompt: a resumed request.
    """

    rollout: int
    prompt: int
    sample: int = 0
    attempt: int = 0
    have: int = 0


class Generate(Command, frozen=True, tag="generate"):
    """Submit requests to ``engine``. Done when the engine has reported the last segment of each."""

    engine: int
    work: list[Work]


class Abort(Command, frozen=True, tag="abort"):
    """Interrupt ``rollouts`` on ``engine``; each reports its last segment before this is done.

    ``fate`` says what the controller will do with them: ``resume`` (prompt and tokens so far are
    sent again), ``restart`` (the tokens are thrown away) or ``cancel``.
    """

    engine: int
    rollouts: list[int]
    fate: AbortFate


class Pause(Command, frozen=True, tag="pause"):
    """Let ``engine`` stand still at its next step boundary. Requests in it are kept."""

    engine: int


class Resume(Command, frozen=True, tag="resume"):
    """Let a paused ``engine`` step again."""

    engine: int


class Flush(Command, frozen=True, tag="flush"):
    """Forget every cached KV block of ``engine``. Refused (``ok=False``) while requests hold some.

    ``recompute``: those requests go back to the head of the queue, in order, with the tokens that they
    have, and compute their KV anew; nothing is refused.
    """

    engine: int
    recompute: bool = False


class Sleep(Command, frozen=True, tag="sleep"):
    """Free the memory of ``engine``: level 1 keeps the weights in host memory, level 2 discards them."""

    engine: int
    level: int


class Wake(Command, frozen=True, tag="wake"):
    """Allocate ``tags`` on ``engine`` again: empty weight buffers after level 2, a fresh KV cache."""

    engine: int
    tags: list[Tag]


class Load(Command, frozen=True, tag="load"):
    """Bring ``parts`` of the trainer to its devices."""

    parts: list[Part]


class Offload(Command, frozen=True, tag="offload"):
    """Move ``parts`` of the trainer to host memory."""

    parts: list[Part]


class Train(Command, frozen=True, tag="train"):
    """Train batch ``index`` of ``version`` (the one that is computed) on ``groups``.

    ``rollouts`` are the samples used. ``last`` closes the version.
    """

    version: int
    index: int
    last: bool
    groups: list[int]
    rollouts: list[int]


class Transfer(Command, frozen=True, tag="transfer"):
    """Bring ``version`` from the trainer to ``engines``, in buckets of at most ``bucket`` bytes."""

    version: int
    engines: list[int]
    transport: Transport
    bucket: int


class Timer(Command, frozen=True, tag="timer"):
    """Answer with ``Done`` at ``at`` nanoseconds, or at once when that is past."""

    at: int


class Stop(Command, frozen=True, tag="stop"):
    """Close the history. From here on it claims to be complete."""

    why: str = ""


AnyCommand = Generate | Abort | Pause | Resume | Flush | Sleep | Wake | Load | Offload | Train | Transfer | Timer | Stop
