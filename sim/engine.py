"""A simulated inference engine: continuous batching in integer picoseconds, advanced per change of composition.

The engine is a plain state machine. Whoever owns it calls ``submit`` and ``control`` when something arrives, and
``boundary(next_t)`` when the clock gets there; of the calls of one instant, ``boundary`` comes last. From a
boundary on the engine runs a *stretch* of like steps, up to the next finish, admission or shortage of blocks,
whose time has a closed form.

A step that has begun completes, and its tokens count, before anything acts on it: what arrives in the middle of a
step acts at that step's end, and what arrives at an end acts there, after the tokens of the step that ends and
before the next step begins. An arrival therefore cuts the stretch at the first step end not before it; one that
could not be admitted anyway leaves the stretch alone. Arrivals act in the order in which they came.
"""

import msgspec

from .batching import OUTSIDE, Batch, Counters, Limits, Sequence
from .costs import StepCosts, step_time, steps_within, stretch_time


class Request(msgspec.Struct, frozen=True, gc=False):
    """One attempt at a rollout, as the engine gets it."""

    #: Unique among the requests inside the engine.
    id: int
    #: Prompt tokens.
    prompt: int
    #: New tokens to generate, at least 1.
    remaining: int
    #: Tokens that earlier attempts generated: prefilled again after the prompt.
    prior: int = 0


class Abort(msgspec.Struct, frozen=True):
    """Stop these requests, queued ones included; ids that aren't inside are ignored."""

    #: Named in the Acked that answers it.
    control: int
    #: None: all that were submitted before.
    ids: tuple[int, ...] | None = None


class Pause(msgspec.Struct, frozen=True):
    """Begin no further step until resumed. The running requests keep their KV; those submitted meanwhile wait."""

    control: int


class Retract(msgspec.Struct, frozen=True):
    """Put the running requests back to the head of the queue, in order, their KV dropped."""

    control: int


class Resume(msgspec.Struct, frozen=True):
    """Go on from where the pause left off."""

    control: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request generated all its tokens."""

    id: int
    #: New tokens of this attempt.
    tokens: int


class Aborted(msgspec.Struct, frozen=True, gc=False):
    """A request was stopped."""

    id: int
    #: New tokens of this attempt, perhaps none.
    tokens: int


class Preempted(msgspec.Struct, frozen=True, gc=False):
    """A running request lost its KV, for want of blocks or by order, and waits to be prefilled again."""

    id: int
    #: New tokens of this attempt so far; they stay.
    tokens: int


class Acked(msgspec.Struct, frozen=True, gc=False):
    """A control has taken effect."""

    control: int


Control = Abort | Pause | Retract | Resume
Outcome = Finished | Aborted | Preempted | Acked


class Engine:
    """One engine. Times are integer picoseconds and may not run backwards."""

    __slots__ = ("_batch", "_clock", "_costs", "_inbox", "_live", "_since", "_steps", "busy", "next_t", "paused")

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        self._batch = Batch(limits)
        self._costs = costs
        #: Requests inside, wherever they are.
        self._live: dict[int, Sequence] = {}
        #: What arrived since the last boundary, in order.
        self._inbox: list[Sequence | Control] = []
        self._clock = 0
        #: The stretch in progress: when it began and how many steps it takes; no steps while the engine stands still.
        self._since = 0
        self._steps = 0
        #: When ``boundary`` is due; None while nothing is.
        self.next_t: int | None = None
        #: Picoseconds spent in completed stretches.
        self.busy = 0
        #: Whether a pause is in effect.
        self.paused = False

    # ---- what arrives

    def submit(self, t: int, request: Request) -> None:
        """Queues a request. InputError if it could never fit; ValueError if its id is inside or it has no tokens."""
        given = request.prompt + request.prior
        if given < 1 or min(request.prompt, request.prior) < 0 or request.remaining < 1:
            raise ValueError(f"{request} must bring at least 1 token and ask for at least 1")
        if request.id in self._live:
            raise ValueError(f"request {request.id} is already inside")
        self._batch.refuse_oversized(given, request.remaining)
        self._arrive(t, seq := Sequence(request.id, given, request.remaining))
        self._live[request.id] = seq
        if not self._admits_nobody():
            self._cut(t)

    def control(self, t: int, control: Control) -> None:
        """Takes an abort, a pause, a retraction or a resume; it is answered by Acked when it has taken effect."""
        self._arrive(t, control)
        self._cut(t)

    def _arrive(self, t: int, item: Sequence | Control) -> None:
        if t < self._clock or (self.next_t is not None and t > self.next_t):
            raise ValueError(f"arrival at {t} ps: the clock shows {self._clock}, the next boundary is at {self.next_t}")
        self._clock = t
        self._inbox.append(item)

    def _admits_nobody(self) -> bool:
        """Whether a request that arrives now would wait at the tail until the next boundary anyway."""
        # A queue that waits beside a stretch is stuck for its whole length: seats and the budget stay as
        # they are, and blocks only get fewer.
        batch = self._batch
        if self._steps:
            return bool(batch.waiting) or len(batch.running) == batch.limits.max_num_seqs
        return self.paused

    def _cut(self, t: int) -> None:
        """Moves the next boundary to the first step end not before t, or to t if no step is in progress."""
        if not self._steps:
            self.next_t = t
        elif self._steps > 1:
            decoding, kv_tokens = self._batch.pool.growing, self._batch.kv_tokens
            ended = steps_within(self._costs, decoding, kv_tokens, max(t - self._since - 1, 0))
            self._steps = min(self._steps, ended + 1)
            self.next_t = self._since + stretch_time(self._costs, decoding, kv_tokens, self._steps)

    # ---- what happens

    def boundary(self, t: int) -> list[Outcome]:
        """Completes the stretch that ends at ``t``, lets what arrived act, and begins the next stretch.

        The order of the outcomes is fixed: finished requests as they were admitted, then what each arrival did,
        then the preempted, newest first. An abort reports its requests in the order of its ids, or else the
        running as they were admitted and then the queue. ValueError if no boundary is due at ``t``.
        """
        if t != self.next_t:
            raise ValueError(f"boundary at {t} ps, but the next one is at {self.next_t}")
        self._clock = t
        outcomes: list[Outcome] = []
        if self._steps:
            self.busy += t - self._since
            for seq in self._batch.advance(self._steps):
                del self._live[seq.id]
                outcomes.append(Finished(seq.id, seq.quota))
        if self._inbox:
            for item in self._inbox:
                self._act(item, outcomes)
            self._inbox.clear()
        self._begin(t, outcomes)
        return outcomes

    def _begin(self, t: int, outcomes: list[Outcome]) -> None:
        batch = self._batch
        self._since, self._steps, self.next_t = t, 0, None
        if self.paused:
            return
        if lost := batch.compose():
            outcomes += [Preempted(seq.id, seq.made) for seq in lost]
        # A step that preempted admits nobody, but the next one may: it stands alone.
        self._steps = 1 if lost else batch.span()
        if self._steps == 1:
            tokens = sum(chunk for _, chunk in batch.chunks)
            self.next_t = t + step_time(self._costs, batch.pool.growing, batch.kv_tokens, tokens)
        elif self._steps:
            self.next_t = t + stretch_time(self._costs, batch.pool.growing, batch.kv_tokens, self._steps)

    def _act(self, item: Sequence | Control, outcomes: list[Outcome]) -> None:
        match item:
            case Sequence():
                self._batch.enqueue(item)
                return
            case Abort(ids=ids):
                for seq in self._targets(ids):
                    self._batch.remove(seq)
                    del self._live[seq.id]
                    outcomes.append(Aborted(seq.id, seq.made))
            case Pause():
                self.paused = True
            case Retract():
                outcomes += [Preempted(seq.id, seq.made) for seq in self._batch.retract()]
            case Resume():
                self.paused = False
        outcomes.append(Acked(item.control))

    def _targets(self, ids: tuple[int, ...] | None) -> list[Sequence]:
        if ids is None:
            return [*self._batch.running.values(), *self._batch.waiting]
        named = [self._live[i] for i in dict.fromkeys(ids) if i in self._live]
        # Those still outside were submitted after the abort.
        return [seq for seq in named if seq.order != OUTSIDE]

    def drop_kv(self) -> None:
        """Gives up the KV memory, as for sleep. ValueError while running requests stand on it."""
        if self._batch.running:
            raise ValueError(f"{len(self._batch.running)} running requests stand on the KV")

    # ---- what can be seen, as of the last boundary

    @property
    def counters(self) -> Counters:
        """What the engine has done so far. Not a copy."""
        return self._batch.counters

    @property
    def running(self) -> tuple[int, ...]:
        """Ids of the running requests, in the order of admission."""
        return tuple(self._batch.running)

    @property
    def waiting(self) -> int:
        """How many requests are inside and not running."""
        return len(self._live) - len(self._batch.running)

    @property
    def used_blocks(self) -> int:
        """KV blocks held."""
        return self._batch.pool.used

    def tokens(self, request: int) -> int:
        """New tokens that a request inside has generated in this attempt. KeyError if it isn't inside."""
        return self._batch.tokens(self._live[request])

    def kv_tokens(self, request: int) -> int:
        """Tokens of a request inside that stand in KV: 0 while it waits. KeyError if it isn't inside."""
        return self._batch.kv_of(self._live[request])
