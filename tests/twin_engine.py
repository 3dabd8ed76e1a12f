"""The token-by-token twin behind the interface that a simulated world wants of its engine.

``World(..., engine=Twins())`` runs a whole world on twins. A twin wakes at the end of every step, an engine of
rlsched's only where something changes: that the histories are alike shows that nothing in a world depends on it.
"""

from rlsched.sim.batching import Limits
from rlsched.sim.costs import StepCosts
from rlsched.sim.engine import Abort, Aborted, Acked, Control, Finished, Outcome, Pause, Preempted, Request, Retract

from .twin import Arrival, Event, Spec, Twin


class TwinEngine:
    """One engine. The step in progress is taken at its beginning and told at its end, for it completes anyway."""

    def __init__(self, limits: Limits, costs: StepCosts) -> None:
        self.twin = Twin(
            Spec(
                num_blocks=limits.num_blocks,
                block_size=limits.block_size,
                max_num_seqs=limits.max_num_seqs,
                max_batch_tokens=limits.max_batch_tokens,
                step=costs.step,
                seq=costs.seq,
                kv=costs.kv,
                prompt=costs.prompt,
            )
        )
        self.next_t: int | None = None
        #: KV blocks held, as of the last boundary.
        self.used_blocks = 0
        #: Boundaries at which nothing happened that a world could see.
        self.silent = 0
        self._inbox: list[Arrival] = []
        self._stepping = False

    def submit(self, t: int, request: Request) -> None:
        """Queues a request."""
        self._arrive((t, "submit", request.id, request.prompt, request.prior, request.remaining))

    def control(self, t: int, control: Control) -> None:
        """Takes an abort, a pause, a retraction or a resume."""
        match control:
            case Abort():
                self._arrive((t, "abort", control.control, control.ids))
            case Pause():
                self._arrive((t, "pause", control.control))
            case Retract():
                self._arrive((t, "retract", control.control))
            case _:
                self._arrive((t, "resume", control.control))

    def boundary(self, t: int) -> list[Outcome]:
        """Ends the step in progress, lets what arrived act, and begins the next step."""
        twin = self.twin
        assert t == self.next_t
        assert t == twin.now or not self._stepping
        twin.now = t
        for arrival in self._inbox:
            twin.ties += self._stepping and arrival[0] == t
            twin.arrive(arrival)
        self._inbox.clear()
        plan = [] if twin.paused else twin.schedule()
        outcomes = [_outcome(event) for event in twin.log]
        twin.log.clear()
        self.silent += not outcomes
        self.used_blocks = sum(job.blocks for job in twin.running)
        self._stepping, self.next_t = bool(plan), None
        if plan:
            twin.take_step(plan)
            self.next_t = twin.now
        return outcomes

    @property
    def running(self) -> tuple[int, ...]:
        """Ids of the running requests."""
        return tuple(job.id for job in self.twin.running)

    def tokens(self, request: int) -> int:
        """New tokens of a request inside. Exact while no step is in progress, as in a pause."""
        assert not self._stepping
        return next(job.new for job in (*self.twin.running, *self.twin.waiting) if job.id == request)

    def drop_kv(self) -> None:
        """Gives up the KV memory, on which nothing may stand."""
        assert not self.twin.running

    def _arrive(self, arrival: Arrival) -> None:
        self._inbox.append(arrival)
        if not self._stepping:
            self.next_t = arrival[0]


def _outcome(event: Event) -> Outcome:
    _, kind, name, tokens = event
    if kind == "acked":
        return Acked(name)
    return {"finished": Finished, "aborted": Aborted, "preempted": Preempted}[kind](name, tokens)


class Twins:
    """Makes twins for a world and keeps them, those of earlier lives included."""

    def __init__(self) -> None:
        self.made: list[TwinEngine] = []

    def __call__(self, limits: Limits, costs: StepCosts) -> TwinEngine:
        self.made.append(TwinEngine(limits, costs))
        return self.made[-1]

    def total(self, name: str) -> int:
        """The sum of a counter over all twins."""
        return sum(getattr(made.twin, name) for made in self.made)
