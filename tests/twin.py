"""A token-by-token twin of the simulated engine: naive lists, one step at a time, no code shared with rlsched.

It restates the engine's rules as plainly as they can be said, so that two programs written apart must agree to the
last event. Random engines and scripts for both stand at the end. A script is a list of arrivals in order of time, each
``(t, kind, *details)``:

* ``(t, "submit", id, prompt, prior, remaining)``
* ``(t, "abort", control, ids or None)``
* ``(t, "pause", control)``
* ``(t, "retract", control)``
* ``(t, "resume", control)``

and a log a list of ``(t, kind, id or control, tokens)`` with the kinds "finished", "aborted", "preempted" and "acked".
"""

from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

Arrival = tuple[Any, ...]
Event = tuple[int, str, int, int]


@dataclass(frozen=True)
class Spec:
    """An engine's limits and its step costs in picoseconds."""

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_batch_tokens: int
    step: int
    seq: int
    kv: int
    prompt: int


@dataclass(eq=False)
class Job:
    """A request; ``known`` tokens exist, of which the first ``cached`` have KV."""

    id: int
    known: int
    goal: int
    new: int = 0
    cached: int = 0
    blocks: int = 0
    prefilled: bool = False


@dataclass
class Twin:
    """Runs one script from time 0 to the last event."""

    spec: Spec
    now: int = 0
    paused: bool = False
    waiting: list[Job] = field(default_factory=list)
    running: list[Job] = field(default_factory=list)
    log: list[Event] = field(default_factory=list)
    steps: int = 0
    busy: int = 0
    decode_tokens: int = 0
    prompt_tokens: int = 0
    prefills: int = 0
    preemptions: int = 0
    retractions: int = 0
    #: Most blocks ever held.
    peak: int = 0
    #: Arrivals at the very end of a step, and aborts in the middle of one that stopped somebody.
    ties: int = 0
    midstep_aborts: int = 0

    def run(self, script: list[Arrival]) -> list[Event]:
        """Returns the log. What remains inside can't move any more, as after a pause without a resume."""
        arrivals = list(script)
        stepped = False
        while True:
            while arrivals and arrivals[0][0] <= self.now:
                self.ties += stepped and arrivals[0][0] == self.now
                self.arrive(arrivals.pop(0))
            plan = [] if self.paused else self.schedule()
            stepped = bool(plan)
            if plan:
                self.take_step(plan)
            elif arrivals:
                self.now = arrivals[0][0]
            else:
                return self.log

    def arrive(self, arrival: Arrival) -> None:
        """Acts at ``self.now``, the first step end not before its own time."""
        t, kind, *details = arrival
        if kind == "submit":
            number, prompt, prior, remaining = details
            self.waiting.append(Job(number, prompt + prior, remaining))
            return
        if kind == "abort":
            ids = details[1]
            targets = self.running + self.waiting
            if ids is not None:
                targets = [job for number in dict.fromkeys(ids) for job in targets if job.id == number]
            for job in targets:
                (self.running if job in self.running else self.waiting).remove(job)
                self.log.append((self.now, "aborted", job.id, job.new))
                self.midstep_aborts += t < self.now
        elif kind == "pause":
            self.paused = True
        elif kind == "retract":
            while self.running:
                self.put_back_newest()
                self.retractions += 1
        elif kind == "resume":
            self.paused = False
        self.log.append((self.now, "acked", details[0], 0))

    def schedule(self) -> list[tuple[Job, int]]:
        """Who computes how many tokens in the next step."""
        budget = self.spec.max_batch_tokens
        plan: list[tuple[Job, int]] = []
        preempted = False
        i = 0
        while i < len(self.running) and budget > 0:
            job = self.running[i]
            tokens = min(job.known - job.cached, budget)
            while job in self.running and not self.allocate(job, tokens):
                self.put_back_newest()
                self.preemptions += 1
                preempted = True
            if job in self.running:
                plan.append((job, tokens))
                budget -= tokens
            i += 1
        while not preempted and self.waiting and len(self.running) < self.spec.max_num_seqs and budget > 0:
            job = self.waiting[0]
            tokens = min(job.known, budget)
            if not self.allocate(job, tokens):
                break
            self.running.append(self.waiting.pop(0))
            plan.append((job, tokens))
            budget -= tokens
        return plan

    def allocate(self, job: Job, tokens: int) -> bool:
        """Blocks for that many more tokens, if there are any."""
        blocks = job.blocks
        while blocks * self.spec.block_size < job.cached + tokens:
            blocks += 1
        held = sum(other.blocks for other in self.running if other is not job) + blocks
        if held > self.spec.num_blocks:
            return False
        job.blocks = blocks
        self.peak = max(self.peak, held)
        return True

    def put_back_newest(self) -> None:
        """To the head of the queue. Its tokens stay, its KV doesn't."""
        job = self.running.pop()
        job.cached = job.blocks = 0
        job.prefilled = False
        self.waiting.insert(0, job)
        self.log.append((self.now, "preempted", job.id, job.new))

    def take_step(self, plan: list[tuple[Job, int]]) -> None:
        """One step, from its start to its end."""
        time = self.spec.step
        for job, tokens in plan:
            time += self.spec.kv * job.cached
            if job.prefilled:
                time += self.spec.seq
                self.decode_tokens += 1
            else:
                time += self.spec.prompt * tokens
                self.prompt_tokens += tokens
        self.now += time
        self.busy += time
        self.steps += 1
        for job, tokens in plan:
            job.cached += tokens
            if job.cached == job.known:
                self.prefills += not job.prefilled
                job.prefilled = True
                job.known += 1
                job.new += 1
            if job.new == job.goal:
                self.running.remove(job)
                self.log.append((self.now, "finished", job.id, job.new))


# ---- random engines and scripts


@st.composite
def tight_specs(draw: st.DrawFn) -> Spec:
    """Little memory, small budgets and steps of a few picoseconds: preemption and ties are common."""
    seats = draw(st.integers(2, 5))
    return Spec(
        num_blocks=draw(st.integers(2, 10)),
        block_size=draw(st.integers(1, 4)),
        max_num_seqs=seats,
        max_batch_tokens=seats + draw(st.integers(0, 8)),
        step=draw(st.integers(1, 4)),
        seq=draw(st.integers(0, 2)),
        kv=draw(st.integers(0, 2)),
        prompt=draw(st.integers(0, 2)),
    )


@st.composite
def ample_specs(draw: st.DrawFn) -> Spec:
    """Room for long stretches, so that the closed forms carry the time."""
    seats = draw(st.integers(2, 5))
    return Spec(
        num_blocks=draw(st.integers(50, 400)),
        block_size=draw(st.integers(1, 16)),
        max_num_seqs=seats,
        max_batch_tokens=seats + draw(st.integers(0, 300)),
        step=draw(st.integers(1, 10**9)),
        seq=draw(st.integers(0, 10**6)),
        kv=draw(st.integers(0, 10**5)),
        prompt=draw(st.integers(0, 10**6)),
    )


@st.composite
def scripts(draw: st.DrawFn, spec: Spec, longest: int, gaps: st.SearchStrategy[int]) -> list[Arrival]:
    """A crowd at the start, then submits and controls at random gaps, and often a last resume."""
    room = spec.num_blocks * spec.block_size
    script: list[Arrival] = []
    t = submitted = 0

    def submit() -> None:
        nonlocal submitted
        prompt = draw(st.integers(1, max(1, min(longest, room) // 2)))
        prior = draw(st.integers(0, min(2, room - prompt)))
        most = min(longest, room - prompt - prior + 1)
        remaining = draw(st.integers(1, most) | st.integers((most + 1) // 2, most))
        script.append((t, "submit", submitted, prompt, prior, remaining))
        submitted += 1

    for _ in range(draw(st.integers(2, 6))):
        submit()
    kinds = st.sampled_from(["submit", "submit", "abort", "abort", "pause", "resume", "resume"])
    for control, kind in enumerate(draw(st.lists(kinds, min_size=2, max_size=10))):
        t += draw(gaps)
        if kind == "submit":
            submit()
        elif kind == "abort":
            some = st.lists(st.integers(0, submitted), min_size=1, max_size=3).map(tuple)
            script.append((t, kind, control, draw(some | some | st.none())))
        elif kind == "pause":
            for part in draw(st.sampled_from((("pause",), ("pause", "retract"), ("retract",)))):
                script.append((t, part, control))
                t += draw(st.integers(0, 1)) * draw(gaps)
        else:
            script.append((t, kind, control))
    if draw(st.integers(0, 3)):
        script.append((t + draw(gaps), "resume", 1000))
    return script


@dataclass
class Shares:
    """Of the examples seen, how many did what they are meant to do."""

    examples: int = 0
    preempted: int = 0
    aborted_midstep: int = 0
    tied: int = 0
    full: int = 0

    def count(self, twin: Twin) -> None:
        self.examples += 1
        self.preempted += twin.preemptions > 0
        self.aborted_midstep += twin.midstep_aborts > 0
        self.tied += twin.ties > 0
        self.full += twin.peak == twin.spec.num_blocks
