"""Facts: what happened in a world. The only input of a controller.

Every fact carries ``t``, integer nanoseconds since the run began. A fact that is the effect of a
command names it in ``by`` (0: part of the set-up, before ``Begin``). Truth about versions is in
``Updating`` and ``Installed``; nothing may be derived from an engine's own label.
"""

from typing import Literal

from msgspec import Struct

Ending = Literal["stop", "length", "abort", "error", "install"]


class Fact(Struct, frozen=True, tag_field="ev", omit_defaults=True, forbid_unknown_fields=True):
    """Base of all facts."""

    t: int


class Begin(Fact, frozen=True, tag="begin"):
    """The world is set up (version 0 is installed, memory is placed): the controller may act."""


class Segment(Fact, frozen=True, tag="segment"):
    """``rollout`` made ``n`` tokens on ``engine`` under one installed ``version``, then ``end`` came.

    ``stop`` and ``length`` finish the rollout; ``abort`` returns it, perhaps with ``n`` = 0; ``error``
    means that it can't be finished. ``kv_from`` is the oldest version that computed any of the KV
    that the tokens stand on.

    ``install`` means that it goes on in the same request under the next version. An engine that is
    paused with requests inside says so of each that made tokens since its last segment, in the order
    of their ids, once it stands still and before the ``Pause`` is done. So no token is told between
    ``Updating`` and ``Installed``, and what a later segment tells are the next version's tokens. The
    tokens of a request come home with its last segment: should the engine go down before, those
    told so far are lost with it.
    """

    by: int
    rollout: int
    engine: int
    version: int
    n: int
    end: Ending
    kv_from: int


class Scored(Fact, frozen=True, tag="scored"):
    """The reward of a finished rollout, with its components. ``keep=False``: a filter rejects its group."""

    rollout: int
    reward: float = 0.0
    parts: dict[str, float] = {}
    keep: bool = True


class Phase(Fact, frozen=True, tag="phase"):
    """The trainer finished a phase (``old_logprob``, ``ref``, ``update``) that took ``ns`` nanoseconds."""

    by: int
    name: str
    ns: int


class Trained(Fact, frozen=True, tag="trained"):
    """A batch of ``tokens`` unmasked tokens was trained on; ``u`` optimizer steps were made in all."""

    by: int
    u: int
    tokens: int
    stats: dict[str, float] = {}


class Updating(Fact, frozen=True, tag="updating"):
    """``engine`` begins to take in ``version``: no forward pass may run there until it is installed."""

    by: int
    engine: int
    version: int


class Bucket(Fact, frozen=True, tag="bucket"):
    """Bucket ``index`` of ``bytes`` bytes reached ``engine`` and was acknowledged after ``ns`` nanoseconds."""

    by: int
    engine: int
    index: int
    bytes: int
    ns: int = 0


class Installed(Fact, frozen=True, tag="installed"):
    """``engine`` ended the update: it holds ``version`` whole if ``ok``, in ``bytes`` bytes."""

    by: int
    engine: int
    version: int
    bytes: int
    ok: bool = True


class Resident(Fact, frozen=True, tag="resident"):
    """``owner`` (``engine`` or ``trainer``) now holds ``bytes`` bytes of ``part`` on ``device``."""

    by: int
    device: int
    owner: Literal["engine", "trainer"]
    part: Literal["weights", "kv", "parameters", "optimizer"]
    bytes: int


class Done(Fact, frozen=True, tag="done"):
    """Command ``cmd`` is answered. ``ok=False`` comes with ``why``."""

    cmd: int
    ok: bool = True
    why: str = ""


class Observed(Fact, frozen=True, tag="observed"):
    """A measurement beside the schedule, such as the fall in RSS of a sleep. No invariant reads it."""

    by: int
    name: str
    value: float


class Down(Fact, frozen=True, tag="down"):
    """``engine`` (None: the trainer) is gone, and everything it held with it."""

    engine: int | None = None
    why: str = ""


class Up(Fact, frozen=True, tag="up"):
    """``engine`` is back with nothing allocated: it needs waking, and a version, before it takes requests."""

    engine: int


class End(Fact, frozen=True, tag="end"):
    """The history is closed. ``ok=False``: the run failed, and ``why`` says how.

    ``stalled``: nothing could happen any more, although the run was not over.
    """

    by: int = 0
    ok: bool = True
    why: str = ""
    stalled: bool = False


AnyFact = (
    Begin
    | Segment
    | Scored
    | Phase
    | Trained
    | Updating
    | Bucket
    | Installed
    | Resident
    | Done
    | Observed
    | Down
    | Up
    | End
)
