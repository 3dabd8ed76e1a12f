"""What crosses the socket between rlsched and a child process: frames, envelopes, commands, answers and notices.

A frame is a four-byte big-endian length and a msgpack body, so that a child written for another interpreter (vLLM and
SGLang pin a torch of their own) needs nothing but msgpack. The parent sends `Call`s; the child sends one `Answer` or
`Failure` for each, in any order, and `Notice`s unasked. Frames are in order on one socket: whatever a child announces
before an answer is seen before it.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Any

import msgspec

Json = dict[str, Any]


class Message(msgspec.Struct, frozen=True, tag=True, omit_defaults=True):
    """Base of everything below: tagged with its class name."""


# ---------------------------------------------------------------- commands to an engine


class Submit(Message):
    """Generate for one rollout. Answer: `Done`. While paused the request waits in the engine's queue."""

    rollout: str
    tokens: list[int]  # prompt, or prompt and the part already generated
    max_new_tokens: int
    forced: bool = True  # True: EOS is ignored and the length is max_new_tokens


class Abort(Message):
    """End these rollouts (None: all), queued ones included. Their `Ended` notices precede the answer `Aborted`."""

    rollouts: list[str] | None = None


class Pause(Message):
    """Stand still at the next step boundary; requests and KV are kept. Answer: `Progress`."""


class Resume(Message):
    """Go on. Refused while weights or KV are not usable. Answer: `Progress`."""


class Flush(Message):
    """Drop cached KV. Answer: `Flushed`; False when live requests stand on it and `recompute` is not set."""

    recompute: bool = False  # True: live requests go back to the queue and recompute their KV (retract)


class Sleep(Message):
    """Give memory back; only inside a pause, with no request standing on KV. Answer: `Slept`."""

    level: int = 1  # 1: drop KV, keep weights in host memory; 2: drop both


class Wake(Message):
    """Take memory again. Answer: `Woken`."""

    tags: list[str] = ["weights", "kv"]


class BeginUpdate(Message):
    """Open a weight update; only inside a pause. From here until `EndUpdate` the weights count as torn. Answer: `Done`."""

    version: int


class CopyBucket(Message):
    """Copy one bucket out of shared memory into the parameters. Answer: `Moved`."""

    path: str
    size: int  # bytes of the whole staging buffer
    pieces: list[Piece]


class ReceiveBuckets(Message):
    """Take a whole set of weights from the broadcast group joined before. Answer: `Moved`."""

    bucket_bytes: int


class EndUpdate(Message):
    """Close the update; refused, and the weights stay unusable, if any byte is missing. Answer: `Updated`."""

    version: int


class Trace(Message):
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


class Train(Message):
    """One trainer call (one batch). Phases are announced as `Phase` notices. Answer: `Trained`."""

    batch: list[Sample]
    version: int  # what the weights are called after this call


class LoadParts(Message):
    """Bring parts ("parameters", "optimizer") to the compute device. Answer: `Shifted`."""

    parts: list[str]


class OffloadParts(Message):
    """Move parts to host memory. Answer: `Shifted`."""

    parts: list[str]


class PackBucket(Message):
    """Write bucket `index` of the weights called `version` into shared memory. Answer: `Packed`."""

    path: str
    size: int  # bytes of the staging buffer; also the bucket size
    index: int
    version: int


class SendBuckets(Message):
    """Broadcast the weights called `version` to the group joined before. Answer: `Moved`."""

    bucket_bytes: int
    version: int


class Evaluate(Message):
    """The trainer's own log-probabilities of these outputs under its present weights. Answer: `Evaluated`."""

    batch: list[Sample]


# ---------------------------------------------------------------- commands to either


class Load(Message):
    """First command of all: build the model and be ready. Answer: `Loaded`."""

    config: Json  # an EngineConfig or TrainerConfig as plain data


class Reset(Message):
    """Back to version 0 (and a fresh optimizer) with the given seed; refused while requests are live. Answer: `Done`."""

    seed: int


class Checksum(Message):
    """Digest of all parameters. Answer: `Digest`."""


class Count(Message):
    """Counters since start or reset. Answer: `Counted`."""


class JoinGroup(Message):
    """Become `rank` of a broadcast group that meets at `address`; an earlier group is left first. Answer: `Done`."""

    address: str  # host:port of a TCP store that rank 0 hosts
    rank: int
    world_size: int
    timeout_s: float


class LeaveGroup(Message):
    """Leave the broadcast group, if any. Answer: `Done`."""


# ---------------------------------------------------------------- answers


class Done(Message):
    """It was done; there is nothing to tell."""


class Loaded(Message):
    """The child is ready."""

    capabilities: Json  # an engine's Capabilities as plain data; a trainer's is empty
    parameter_bytes: int
    checksum: str


class Progress(Message):
    """Where the requests stand at this step boundary."""

    live: dict[str, int]  # rollout -> tokens generated since its Submit
    version: int


class Aborted(Message):
    """The rollouts ended by this abort; unknown and already finished ones are not among them."""

    rollouts: list[str]


class Flushed(Message):
    """Whether KV was dropped."""

    ok: bool


class Slept(Message):
    """What the sleep gave back, by the operating system's own count."""

    level: int
    rss_before: int  # bytes
    rss_after: int
    freed: int  # rss_before - rss_after


class Woken(Message):
    """What is awake now, and whether the weights may be used (not after a level 2 sleep, until an update)."""

    awake: list[str]
    weights_usable: bool


class Moved(Message):
    """Buckets that passed here: bytes and nanoseconds of each."""

    bytes: list[int]
    ns: list[int]


class Packed(Message):
    """A bucket lies in shared memory."""

    pieces: list[Piece]
    bytes: int
    ns: int
    buckets: int  # how many make a whole set


class Updated(Message):
    """New weights are in. `live` says how far each live request had come: its later tokens are the new version's."""

    version: int
    bytes: int
    checksum: str
    live: dict[str, int]


class Step(msgspec.Struct, frozen=True, array_like=True):
    """One engine step. Tokens of a resumed or retracted request that are computed again count as prompt tokens."""

    elapsed_ns: int  # from the end of the previous step (or from the wake-up) to the end of this one, holding included
    worked_ns: int  # the same without the holding
    decoding: int  # requests that computed exactly one token past an already computed context
    kv_tokens: int  # tokens of context that the decoding requests read, this step's own token not included
    prompt_tokens: int  # tokens computed for all other requests


class Steps(Message):
    """Steps in order."""

    steps: list[Step]


class Trained(Message):
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


class Shifted(Message):
    """What moved; 0 where the compute device is the host."""

    parts: list[str]
    moved: int  # bytes


class Evaluated(Message):
    """Log-probabilities, one list for each sample."""

    logprobs: list[list[float]]


class Digest(Message):
    """Checksum of all parameters, in name order."""

    checksum: str
    version: int


class Counted(Message):
    """Counters; an overrun is real work that took longer than its declared minimum."""

    held: int  # units of work (steps, phases, buckets, ...) that were paced
    declared_ns: int
    overruns: int
    overrun_ns: int
    cpu_ns: int  # CPU time of this process, all threads
    rss: int  # bytes


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A run of one parameter's elements inside a bucket."""

    name: str
    start: int  # first element
    count: int  # elements
    offset: int  # bytes from the start of the bucket


# ---------------------------------------------------------------- notices


class Ended(Message):
    """A request left the engine."""

    rollout: str
    tokens: list[int]  # generated since its Submit
    logprobs: list[float]  # of those tokens, after temperature
    reason: str  # "stop" | "length" | "abort"
    version: int  # installed when its first token was computed; when none was: at its end
    at_ns: int  # CLOCK_MONOTONIC, one clock for all processes of this machine


class Phase(Message):
    """A trainer phase begins or ends."""

    phase: str  # "old_logprob" | "ref" | "update"
    edge: str  # "begin" | "end"
    at_ns: int  # CLOCK_MONOTONIC


class Fatal(Message):
    """The child's last word: its working thread died. The process exits with a non-zero code right after."""

    error: str


# ---------------------------------------------------------------- envelopes and frames

Command = (
    Submit | Abort | Pause | Resume | Flush | Sleep | Wake | BeginUpdate | CopyBucket | ReceiveBuckets | EndUpdate
    | Trace | Train | LoadParts | OffloadParts | PackBucket | SendBuckets | Evaluate
    | Load | Reset | Checksum | Count | JoinGroup | LeaveGroup
)  # fmt: skip
Result = (
    Done | Loaded | Progress | Aborted | Flushed | Slept | Woken | Moved | Packed | Updated | Steps
    | Trained | Shifted | Evaluated | Digest | Counted
)  # fmt: skip
Event = Ended | Phase | Fatal


class Call(msgspec.Struct, frozen=True, array_like=True):
    """Parent to child."""

    id: int
    command: Command


class Answer(msgspec.Struct, frozen=True, array_like=True, tag="answer"):
    """Child to parent: call `id` was done."""

    id: int
    result: Result


class Failure(msgspec.Struct, frozen=True, array_like=True, tag="failure"):
    """Child to parent: call `id` was not done. The child lives on."""

    id: int
    error: str
    refused: bool  # True: the command made no sense now and changed nothing; False: it was tried and failed


class Notice(msgspec.Struct, frozen=True, array_like=True, tag="notice"):
    """Child to parent, unasked."""

    event: Event


Upward = Answer | Failure | Notice

HEADER = struct.Struct(">I")


class Refused(Exception):
    """A command that makes no sense now; it changed nothing."""


def frame(message: Call | Upward) -> bytes:
    """One message as bytes on the wire."""
    body = msgspec.msgpack.encode(message)
    return HEADER.pack(len(body)) + body


class Port:
    """A child's end of the socket: blocking reads by one thread, writes by any."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._reader = connection.makefile("rb")
        self._decoder = msgspec.msgpack.Decoder(Call)
        self._lock = threading.Lock()

    def receive(self) -> Call | None:
        """The next call; None when the parent has closed its end or is gone."""
        header = self._reader.read(HEADER.size)
        if len(header) < HEADER.size:
            return None
        (length,) = HEADER.unpack(header)
        body = self._reader.read(length)
        return self._decoder.decode(body) if len(body) == length else None

    def send(self, message: Upward) -> None:
        """Write one frame whole. A parent that is gone is not an error here: `receive` reports it."""
        data = frame(message)
        with self._lock:
            try:
                self._socket.sendall(data)
            except (BrokenPipeError, ConnectionResetError):
                return

    def notify(self, event: Event) -> None:
        """Send an event unasked."""
        self.send(Notice(event))
