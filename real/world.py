"""The real world: it stamps facts with the wall clock and executes the controller's commands on engines and trainer.

Nothing of the policy is here. Commands of one engine reach it in the order of issue; each is carried
out by a task of its own, so that none waits behind another's answer. A run outlives its engines but
the last; without a trainer it ends.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Literal

from rlsched.commands import (
    Abort,
    Command,
    Flush,
    Generate,
    Load,
    Offload,
    Pause,
    Resume,
    Sleep,
    Stop,
    Timer,
    Train,
    Transfer,
    Wake,
    Work,
)
from rlsched.controller import Controller
from rlsched.errors import PolicyError
from rlsched.facts import (
    AnyFact,
    Begin,
    Done,
    Down,
    End,
    Installed,
    Observed,
    Phase,
    Resident,
    Scored,
    Segment,
    Trained,
)
from rlsched.history import Line
from rlsched.manifest import Manifest
from rlsched.notes import Admit, Cancel, Drop, Note, Publish, Reject
from rlsched.session import Session

from . import answers
from .child import ChildDied
from .requests import Requests
from .rig import Rig
from .rollouts import RolloutLog, Rollouts
from .task import grade
from .transfers import Transfers

HELD_OUT = "held_out"
"""Name under which a score is observed."""
Look = Callable[[int, int], Awaitable[float | None]]
"""Scores a version on an engine that holds it; None: not this version."""


class World:
    """One real run on the children of ``rig``.

    ``look`` is asked for each published version before any request is sent under it, on the engine that would be
    first, and at the end. That engine's further commands wait, so that no install comes between; its answer is
    recorded as ``Observed``.
    """

    def __init__(
        self,
        rig: Rig,
        controller: Controller,
        manifest: Manifest,
        record: Callable[[Line], None],
        log: RolloutLog | None = None,
        look: Look | None = None,
    ) -> None:
        self._rig = rig
        self._manifest = manifest
        self._session = Session(controller, record)
        self._log = log
        self._look = look
        self._published = 0
        self._looked = -1
        self._start = time.monotonic_ns()
        self._ended = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._queues: dict[int, asyncio.Queue[Command]] = {e: asyncio.Queue() for e in rig.engines}
        self._rollouts = Rollouts(self._make)
        self._requests = Requests()
        self._groups: dict[int, range] = {}
        self._group_of: dict[int, int] = {}
        self._down: set[int] = set()
        self._transfers = Transfers(rig, self.post, self._now, self._down, self._requests.moved)
        self._training: int | None = None
        self._phase_began = 0
        self._failure: Exception | None = None

    async def run(self) -> End:
        """Run to the end; how it ended. Raises PolicyError if a slot can't be obeyed."""
        rig = self._rig
        rig.listen(self._on_ended, self._on_phase, self._on_down)
        installed = await rig.reset(self._manifest)
        self._start = time.monotonic_ns()
        for resident in rig.residents(self._manifest.devices):
            self.post(resident)
        for engine, size in installed.items():
            self.post(Installed(0, 0, engine, 0, size))
        self.post(Begin(0))
        senders = [asyncio.create_task(self._send(e)) for e in self._queues]
        try:
            await self._ended.wait()
        except asyncio.CancelledError:
            self._fail("interrupted")
            raise
        finally:
            rig.deaf()
            for task in (*senders, *self._tasks):
                task.cancel()
            await asyncio.gather(*senders, *self._tasks, return_exceptions=True)
        if isinstance(self._failure, PolicyError):
            raise self._failure
        assert self._session.ended is not None
        return self._session.ended

    def _now(self) -> int:
        return time.monotonic_ns() - self._start

    def post(self, fact: AnyFact) -> None:
        """Record a fact and set in motion what the controller answers."""
        try:
            for line in self._session.post(fact):
                self._take(line)
        except PolicyError as error:
            self._failure = error
            self._fail(str(error))
        if self._session.ended is not None:
            self._ended.set()

    def _fail(self, why: str) -> None:
        """End the run here; what was recorded stays."""
        if self._session.ended is None:
            self._session.post(End(self._now(), ok=False, why=why))
        self._ended.set()

    # ---- from the children

    def _on_ended(self, engine: int, told: answers.Ended) -> None:
        id = int(told.rollout)
        rollout = self._rollouts[id]
        try:
            home = self._requests.back(id, len(told.tokens), told.version, self._transfers.installed[engine])
        except ValueError as error:
            self._fail(f"engine {engine}: {error}")
            return
        rollout.extend(told.tokens, told.logprobs, home.spans)
        rest = home.spans[-1]
        end: Literal["stop", "length", "abort"] = "stop"
        if told.reason == "abort":
            end = "abort"
        elif len(rollout.output) >= self._manifest.shape.budget:
            end = "length"
        self.post(Segment(self._now(), home.by, id, engine, rest.version, rest.n, end, home.kv))
        if id not in self._group_of:
            self._rollouts.forget(range(id, id + 1))
        if home.last:
            self.post(Done(self._now(), home.by))
        if end != "abort" and id in self._group_of:
            self._do(self._score(id))

    def _on_phase(self, told: answers.Phase) -> None:
        if told.edge == "begin":
            self._phase_began = told.at_ns
        elif self._training is not None:
            self.post(Phase(self._now(), self._training, told.phase, told.at_ns - self._phase_began))

    def _on_down(self, engine: int | None, error: ChildDied) -> None:
        if engine is not None:
            self._down.add(engine)
            for id in self._requests.lose(engine):
                if id not in self._group_of:
                    self._rollouts.forget(range(id, id + 1))
        else:
            self._transfers.orphaned = True
        self.post(Down(self._now(), engine, str(error)))
        if len(self._down) == len(self._queues):
            self._fail(f"no engine is left: {error}")

    async def _score(self, id: int) -> None:
        rollout = self._rollouts.get(id)
        if rollout is None:
            return
        result = grade(rollout.prompt, rollout.output, rollout.length)
        workload = self._rig.setup.workload
        if workload.reward_s:
            await asyncio.sleep(workload.reward_s)
        rollout.reward, rollout.parts = result.total, result.components
        if self._log is not None:
            self._log.write(rollout)
        keep = workload.kept(self._manifest.seed, rollout.prompt_index, rollout.attempt)
        self.post(Scored(self._now(), id, result.total, result.components, keep))

    # ---- to the children

    def _take(self, line: Command | Note) -> None:
        match line:
            case Admit():
                self._groups[line.group] = range(line.first, line.first + line.launch_n)
                self._group_of.update(dict.fromkeys(self._groups[line.group], line.group))
            case Reject() | Drop() | Cancel():
                self._forget([line.group])
            case Generate() | Abort() | Pause() | Resume() | Flush() | Sleep() | Wake():
                self._queues[line.engine].put_nowait(line)
            case Train():
                self._do(self._train(line))
            case Transfer():
                self._do(self._transfers.carry(line))
            case Load() | Offload():
                self._do(self._shift(line))
            case Publish():
                self._published = line.version
            case Timer():
                self._do(self._timer(line))
            case Stop():
                self._do(self._stop(line))
            case _:
                pass

    def _do(self, work: Awaitable[None]) -> None:
        """Carry ``work`` out in a task of its own."""
        task = asyncio.create_task(self._watched(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _watched(self, work: Awaitable[None]) -> None:
        """Carry ``work`` out; a failure ends the run."""
        try:
            await work
        except ChildDied:
            pass  # told by on_down, with a fact of its own
        except Exception as error:
            self._fail(f"{type(error).__name__}: {error}")

    async def _send(self, engine: int) -> None:
        """Pass commands to one engine in order."""
        queue = self._queues[engine]
        while True:
            command = await queue.get()
            if isinstance(command, Generate):
                await self._watched(self._see(engine, command.id))
            if engine in self._down:
                continue  # its Down has answered the command
            if isinstance(command, Generate):
                self._requests.send(command)
                for work in command.work:
                    self._do(self._submit(engine, work))
            else:
                self._do(self._control(engine, command))
            # The tasks made so far write their first message before the next command's do.
            await asyncio.sleep(0)

    async def _see(self, engine: int, by: int) -> None:
        """Let the published version be scored, once."""
        if self._look is None or self._looked >= self._published or engine in self._down:
            return
        before, self._looked = self._looked, self._published
        try:
            score = await self._look(self._published, engine)
        except ChildDied:
            self._looked = before
            raise
        if score is not None:
            self.post(Observed(self._now(), by, HELD_OUT, score))

    async def _submit(self, engine: int, work: Work) -> None:
        if engine in self._down:
            return
        rollout = self._rollouts.begin(work)
        given = [*rollout.prompt, *rollout.output]
        wanted = rollout.length - work.have
        await self._rig.engines[engine].submit(str(work.rollout), given, wanted, forced=self._rig.setup.forced)

    async def _control(self, engine: int, command: Command) -> None:
        client = self._rig.engines[engine]
        device = next(d.id for d in self._manifest.devices if d.engine == engine)
        ok, why = True, ""
        match command:
            case Abort():
                await client.abort([str(r) for r in command.rollouts])
            case Pause():
                self._stands(engine, (await client.pause()).live)
            case Resume():
                await client.resume()
            case Flush():
                ok = (await client.flush(recompute=command.recompute)).ok
                if command.recompute:
                    self._requests.retract(engine)
                why = "" if ok else f"engine {engine} refused to flush: requests hold KV"
            case Sleep():
                await client.pause()
                level: Literal[1, 2] = 2 if command.level == 2 else 1
                slept = await client.sleep(level)
                self.post(Observed(self._now(), command.id, f"engine-{engine}/rss_freed", slept.freed))
                for part, size in self._rig.engine_bytes(engine).items():
                    kept = size if part not in client.capabilities.sleep_frees else 0
                    if part == "weights" and level == 1 and client.capabilities.device == "cpu":
                        kept = size  # level 1 moves them to the host, where they are
                    self.post(Resident(self._now(), command.id, device, "engine", part, kept))
            case Wake():
                woken = await client.wake(command.tags)
                for part in command.tags:
                    size = self._rig.engine_bytes(engine)[part]
                    self.post(Resident(self._now(), command.id, device, "engine", part, size))
                if len(woken.awake) == 2:
                    await client.resume()
        if engine not in self._down:
            self.post(Done(self._now(), command.id, ok, why))

    def _stands(self, engine: int, live: dict[str, int]) -> None:
        """Tell what the requests inside have made of the version that is about to go."""
        version = self._transfers.installed[engine]

        def tell(by: int, rollout: int, n: int, kv: int) -> None:
            self.post(Segment(self._now(), by, rollout, engine, version, n, "install", kv))

        self._requests.stand(engine, live, version, tell)

    async def _train(self, command: Train) -> None:
        self._training = command.id
        samples = [self._rollouts[r].sample_of(self._group_of[r]) for r in command.rollouts]
        told = await self._rig.trainer.train(samples, command.version)
        self._training = None
        self._forget(command.groups)
        stats = {
            "loss": told.loss,
            "grad_norm": told.grad_norm,
            "clip_fraction": told.clip_fraction,
            "reward": told.reward,
            "max_logprob_gap": told.max_logprob_gap,
        }
        self.post(Trained(self._now(), command.id, told.optimizer_steps, told.tokens, stats))
        self.post(Done(self._now(), command.id))

    async def _shift(self, command: Load | Offload) -> None:
        move = self._rig.trainer.load if isinstance(command, Load) else self._rig.trainer.offload
        shifted = await move(command.parts)
        away = isinstance(command, Offload) and shifted.moved > 0
        for resident in self._rig.trainer_residents(
            self._manifest.devices, command.parts, self._now(), command.id, away
        ):
            self.post(resident)
        self.post(Done(self._now(), command.id))

    async def _timer(self, command: Timer) -> None:
        await asyncio.sleep(max(0, command.at - self._now()) / 1e9)
        self.post(Done(self._now(), command.id))

    async def _stop(self, command: Stop) -> None:
        if not command.why:
            await self._see(min({*self._queues} - self._down), command.id)
        for name, counted in (await self._rig.counts()).items():
            self.post(Observed(self._now(), command.id, f"{name}/overrun_share", counted.overrun_ns / self._now()))
            self.post(Observed(self._now(), command.id, f"{name}/overruns", counted.overruns))
        self.post(End(self._now(), command.id, not command.why, command.why))

    # ---- books

    def _make(self, work: Work) -> tuple[list[int], int]:
        setup, shape = self._rig.setup, self._manifest.shape
        length = shape.budget
        if setup.forced:
            length = setup.workload.output_tokens(
                self._manifest.seed, work.prompt, work.sample, work.attempt, shape.budget
            )
        return setup.task.prompt(work.prompt), length

    def _forget(self, groups: list[int]) -> None:
        for group in groups:
            rollouts = self._groups.pop(group)
            for r in rollouts:
                if r not in self._requests:
                    self._rollouts.forget(range(r, r + 1))
                self._group_of.pop(r, None)
