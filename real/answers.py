"""What a child tells its parent: answers to commands, and notices unasked."""

from __future__ import annotations

import msgspec

from .commands import Json, Message, Piece

# ---------------------------------------------------------------- answers


class Done(Message, frozen=True):
    """It was done; there is nothing to tell."""


class Loaded(Message, frozen=True):
    """The child is ready."""

    capabilities: Json  # an engine's Capabilities as plain data; a trainer's is empty
    parameter_bytes: int
    checksum: str


class Progress(Message, frozen=True):
    """Where the requests stand at this step boundary."""

    live: dict[str, int]  # rollout -> tokens generated since its Submit
    version: int


class Aborted(Message, frozen=True):
    """The rollouts ended by this abort; unknown and already finished ones are not among them."""

    rollouts: list[str]


class Flushed(Message, frozen=True):
    """Whether KV was dropped."""

    ok: bool


class Slept(Message, frozen=True):
    """What the sleep gave back, by the operating system's own count."""

    level: int
    rss_before: int  # bytes
    rss_after: int
    freed: int  # rss_before - rss_after


class Woken(Message, frozen=True):
    """What is awake now, and whether the weights may be used (not after a level 2 sleep, until an update)."""

    awake: list[str]
    weights_usable: bool


class Hosted(Message, frozen=True):
    """Where the group meets."""

    address: str  # host:port


class Offered(Message, frozen=True):
    """The weights on offer."""

    buckets: int  # how many make the whole set
    checksum: str


class Moved(Message, frozen=True):
    """A bucket that passed here."""

    bytes: int
    ns: int


class Packed(Message, frozen=True):
    """A bucket lies in shared memory."""

    pieces: list[Piece]
    bytes: int
    ns: int


class Updated(Message, frozen=True):
    """New weights are in. `live` says how far each live request had come: its later tokens are the new version's."""

    version: int
    bytes: int
    checksum: str
    live: dict[str, int]
    way: str = ""  # how a library in processes of its own took them, in its words; empty: there is only one way


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One engine step. Tokens of a resumed or retracted request that are computed again count as prompt tokens."""

    elapsed_ns: int  # from the end of the previous step (or from the wake-up) to the end of this one, holding included
    worked_ns: int  # the same without the holding
    decoding: int  # requests that computed exactly one token past an already computed context
    kv_tokens: int  # tokens of context that the decoding requests read, this step's own token not included
    prompt_tokens: int  # tokens computed for all other requests


class Steps(Message, frozen=True):
    """Steps in order."""

    steps: list[Step]


class Trained(Message, frozen=True):
    """What one trainer call did."""

    version: int
    optimizer_steps: int  # u: since start or reset
    tokens: int  # with non-zero loss mask
    loss: float
    grad_norm: float
    clip_fraction: float
    reward: float  # mean over the batch
    max_logprob_gap: float  # largest |engine logprob - own logprob| over the masked-in tokens, before the update
    phase_ns: dict[str, int]


class Shifted(Message, frozen=True):
    """What moved; 0 where the compute device is the host."""

    parts: list[str]
    moved: int  # bytes


class Evaluated(Message, frozen=True):
    """Log-probabilities, one list for each sample."""

    logprobs: list[list[float]]


class Digest(Message, frozen=True):
    """Checksum of all parameters, in name order."""

    checksum: str
    version: int


class Counted(Message, frozen=True):
    """Counters; an overrun is real work that took longer than its declared minimum."""

    held: int  # units of work (steps, phases, buckets, ...) that were paced
    declared_ns: int
    overruns: int
    overrun_ns: int
    cpu_ns: int  # CPU time of this process, all threads
    rss: int  # bytes


# ---------------------------------------------------------------- notices


class Ended(Message, frozen=True):
    """A request left the engine."""

    rollout: str
    tokens: list[int]  # generated since its Submit
    logprobs: list[float]  # of those tokens, after temperature
    reason: str  # "stop" | "length" | "abort"
    version: int  # installed when its first token was computed; when none was: at its end
    at_ns: int  # CLOCK_MONOTONIC, one clock for all processes of this machine
    labels: list[tuple[int, int]] | None = None  # the library's own word: (version, tokens) in turn; None: it says none
    cached: int | None = None  # input tokens whose KV was there already, of an equal prefix; None: it doesn't say


class Phase(Message, frozen=True):
    """A trainer phase begins or ends."""

    phase: str  # "old_logprob" | "ref" | "update"
    edge: str  # "begin" | "end"
    at_ns: int  # CLOCK_MONOTONIC


class Fatal(Message, frozen=True):
    """The child's last word: its working thread died. The process exits with a non-zero code right after."""

    error: str


Result = (
    Done
    | Loaded
    | Progress
    | Aborted
    | Flushed
    | Slept
    | Woken
    | Hosted
    | Offered
    | Moved
    | Packed
    | Updated
    | Steps
    | Trained
    | Shifted
    | Evaluated
    | Digest
    | Counted
)
Event = Ended | Phase | Fatal
