"""What the parent asks of a child: commands to engines and trainers.

Each names its answer (see `answers`). Every command may be refused, which changes nothing and is raised as
`wire.Refused` in the parent.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

Json = dict[str, Any]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of commands and answers: tagged with the class name."""


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A run of one parameter's elements inside a bucket."""

    name: str
    start: int  # first element
    count: int  # elements
    offset: int  # bytes from the start of the bucket


# ---------------------------------------------------------------- commands to an engine


class Submit(Message, frozen=True):
    """Generate for one rollout. Answer: `Done`. While paused the request waits in the engine's queue."""

    rollout: str
    tokens: list[int]  # prompt, or prompt and the part already generated
    max_new_tokens: int
    forced: bool = True  # True: EOS is ignored and the length is max_new_tokens


class Abort(Message, frozen=True):
    """End these rollouts (None: all), queued ones included. Their `Ended` notices precede the answer `Aborted`."""

    rollouts: list[str] | None = None


PauseMode = Literal["keep", "retract", "abort", "wait"]
"""What a pause does to live requests: they freeze with their KV; go back to the queue and compute theirs anew; end
with what they have, queued ones included; or end by themselves before the pause takes effect. (SGLang calls the first
`in_place`.)"""


class Pause(Message, frozen=True):
    """Stand still at the next step boundary. Refused in a mode that the engine hasn't. Answer: `Progress`."""

    mode: PauseMode = "keep"


class Resume(Message, frozen=True):
    """Go on. Refused while weights or KV are not usable. Answer: `Progress`."""


class Flush(Message, frozen=True):
    """Drop cached KV. Answer: `Flushed`; False when live requests stand on it and `recompute` is not set."""

    recompute: bool = False  # True: live requests go back to the queue and recompute their KV (retract)


class Sleep(Message, frozen=True):
    """Give memory back; only inside a pause, with no request standing on KV. Answer: `Slept`."""

    level: int = 1  # 1: drop KV, keep weights in host memory; 2: drop both


class Wake(Message, frozen=True):
    """Take memory again. Answer: `Woken`."""

    tags: list[str]  # of "weights", "kv"


class BeginUpdate(Message, frozen=True):
    """Open a weight update; only inside a pause. Until `EndUpdate` the weights count as torn. Answer: `Done`."""

    version: int


class CopyBucket(Message, frozen=True):
    """Copy one bucket out of shared memory into the parameters. Answer: `Moved`."""

    path: str
    size: int  # bytes of the whole staging buffer
    pieces: list[Piece]


class ReceiveBucket(Message, frozen=True):
    """Take a bucket from the broadcast group joined before, and copy it. Answer: `Moved`."""

    bucket_bytes: int
    index: int


class ReadBucket(Message, frozen=True):
    """Read one bucket out of a checkpoint file and copy it. Answer: `Moved`."""

    path: str
    bucket_bytes: int
    index: int


class EndUpdate(Message, frozen=True):
    """Close the update; refused, and the weights stay unusable, if any byte is missing. Answer: `Updated`."""

    version: int


class Ping(Message, frozen=True):
    """Whether that which steps is there. Answer: `Done`, from between two steps."""


class Trace(Message, frozen=True):
    """Switch the recording of engine steps. Answer: `Steps` with what was recorded since the last `Trace`."""

    on: bool


# ---------------------------------------------------------------- commands to a trainer


class Sample(msgspec.Struct, frozen=True):
    """One finished rollout as training data."""

    prompt: list[int]
    output: list[int]
    logprobs: list[float]  # of `output`, as the engine reported them
    reward: float
    group: int  # samples of one prompt share it; advantages are relative to it
    mask: list[int] | None = None  # loss mask over `output`; None: every token counts


class Train(Message, frozen=True):
    """One trainer call (one batch). Phases are announced as `Phase` notices. Answer: `Trained`."""

    batch: list[Sample]
    version: int  # what the weights are called after this call


class LoadParts(Message, frozen=True):
    """Bring parts ("parameters", "optimizer") to the compute device. Answer: `Shifted`."""

    parts: list[str]


class OffloadParts(Message, frozen=True):
    """Move parts to host memory. Answer: `Shifted`."""

    parts: list[str]


class Offer(Message, frozen=True):
    """Is the trainer idle, and are its weights called `version`? Answer: `Offered`."""

    version: int
    bucket_bytes: int


class PackBucket(Message, frozen=True):
    """Write bucket `index` of the weights called `version` into shared memory. Answer: `Packed`."""

    path: str
    size: int  # bytes of the staging buffer; also the bucket size
    index: int
    version: int


class SendBucket(Message, frozen=True):
    """Broadcast bucket `index` of the weights called `version` to the group joined before. Answer: `Moved`."""

    bucket_bytes: int
    index: int
    version: int
    ahead: bool = False  # pack the next one while this one is on its way


class SaveCheckpoint(Message, frozen=True):
    """Write the weights called `version` to a file, which appears whole or not at all. Answer: `Moved`."""

    path: str
    version: int


class Evaluate(Message, frozen=True):
    """The trainer's own log-probabilities of these outputs under its present weights. Answer: `Evaluated`."""

    batch: list[Sample]


# ---------------------------------------------------------------- commands to either


class Load(Message, frozen=True):
    """First command of all: build the model and be ready. Answer: `Loaded`."""

    config: Json  # an EngineConfig or TrainerConfig as plain data


class Reset(Message, frozen=True):
    """Back to version 0 and a fresh optimizer; refused while requests are live. Answer: `Done`."""

    seed: int  # of sampling


class Checksum(Message, frozen=True):
    """Digest of all parameters. Answer: `Digest`."""


class Count(Message, frozen=True):
    """Counters since start or reset. Answer: `Counted`."""


class HostGroup(Message, frozen=True):
    """Open the place where a broadcast group will meet; an earlier group is left first. Answer: `Hosted`."""


class JoinGroup(Message, frozen=True):
    """Become `rank` of a broadcast group; an earlier one is left first. Answer: `Done`, when all have met."""

    address: str  # host:port of the TCP store that rank 0 hosts
    rank: int
    world_size: int
    timeout_s: float


class LeaveGroup(Message, frozen=True):
    """Leave the broadcast group, if any. Answer: `Done`."""


Command = (
    Submit
    | Abort
    | Pause
    | Resume
    | Flush
    | Sleep
    | Wake
    | BeginUpdate
    | CopyBucket
    | ReceiveBucket
    | ReadBucket
    | EndUpdate
    | Ping
    | Trace
    | Train
    | LoadParts
    | OffloadParts
    | Offer
    | PackBucket
    | SendBucket
    | SaveCheckpoint
    | Evaluate
    | Load
    | Reset
    | Checksum
    | Count
    | HostGroup
    | JoinGroup
    | LeaveGroup
)
