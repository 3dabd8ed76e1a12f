"""Faults to order: what can go wrong with an engine of a real run, and when.

    rig = await Rig.start(setup, 2, engine=FaultyEngine)
    faults = Faults(rig, [(lambda line: isinstance(line, Updating), Kill(1))])
    await perform(rig, policy, seed, path, watch=faults)
    await faults.heal()

A moment is a condition on a line of the history; a fault strikes at the first line that meets it, before that line is
acted upon. Nothing is pretended: processes get real signals, copies fail in the engine's own process, and a flush is
refused because a request does hold KV. Only lateness is made here, by keeping what an engine said.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, Self, TypeVar

from msgspec import Struct

from rlsched.history import Line
from rlsched.notes import Publish

from . import answers, commands, processes
from .client import EngineClient, ignore
from .config import EngineConfig
from .rig import Rig

R = TypeVar("R", bound=commands.Message)
Moment = Callable[[Line], bool]
STRAY = "stray"
GONE = "-gone"


class FaultyEngine(EngineClient):
    """An engine whose copies can be made to fail, and whose words can be kept back. Until then it is like any other."""

    bad_bucket: int | None = None
    """The bucket whose copy fails next."""
    _bucket = 0
    _mouth: "Mouth"

    @classmethod
    async def start(
        cls,
        name: str,
        config: EngineConfig,
        run_dir: Path,
        *,
        on_ended: Callable[[answers.Ended], None] = ignore,
        **options: Any,
    ) -> Self:
        """Start an engine child."""
        mouth = Mouth(on_ended)
        client = await super().start(name, config, run_dir, on_ended=mouth.say, **options)
        client._mouth = mouth
        return client

    async def _ask(self, command: commands.Command, answer: type[R], limit_s: float | None = None) -> R:
        told = await super()._ask(command, answer, limit_s)
        await self._mouth.open.wait()  # its answers come in order with all else
        return told

    def hush(self) -> None:
        """Keep back all that it says from now on."""
        self._mouth.open.clear()

    def speak(self) -> None:
        """Tell what was kept back, in order, and all that comes."""
        self._mouth.speak(tell=self.child.alive)  # of one that has died its end was told

    async def stray(self) -> None:
        """Generate as much as there is room for, beside what is scheduled; nobody is told of it."""
        prompt = [1]
        await self.submit(STRAY, prompt, self.capabilities.max_request_tokens - len(prompt))

    def _fails(self) -> bool:
        now, self._bucket = self._bucket, self._bucket + 1
        if now != self.bad_bucket:
            return False
        self.bad_bucket = None
        return True

    async def begin_update(self, version: int) -> None:
        self._bucket = 0
        await super().begin_update(version)

    async def copy_bucket(self, path: str, size: int, pieces: list[commands.Piece]) -> answers.Moved:
        return await super().copy_bucket(path + GONE if self._fails() else path, size, pieces)

    async def receive(self, bucket_bytes: int, index: int) -> answers.Moved:
        return await super().receive(bucket_bytes, 1 << 30 if self._fails() else index)

    async def read_bucket(self, path: str, bucket_bytes: int, index: int) -> answers.Moved:
        return await super().read_bucket(path + GONE if self._fails() else path, bucket_bytes, index)


class Mouth:
    """What an engine says of ended requests, on its way to ``on_ended``."""

    def __init__(self, on_ended: Callable[[answers.Ended], None]) -> None:
        self.open = asyncio.Event()
        self.open.set()
        self._on_ended = on_ended
        self._kept: list[answers.Ended] = []

    def say(self, told: answers.Ended) -> None:
        """One of its words."""
        if told.rollout == STRAY:
            return
        if self.open.is_set():
            self._on_ended(told)
        else:
            self._kept.append(told)

    def speak(self, tell: bool) -> None:
        """Let the kept ones go on (or forget them), and all that come."""
        kept, self._kept = self._kept, []
        for told in kept if tell else ():
            self._on_ended(told)
        self.open.set()


class Fault(Protocol):
    """Something that goes wrong."""

    def strike(self, faults: "Faults") -> None:
        """Do it, now."""


class Kill(Struct, frozen=True):
    """SIGKILL an engine's own process, or those that it has started whose command line holds ``part``."""

    engine: int
    part: str = ""

    def strike(self, faults: "Faults") -> None:
        """Do it, now."""
        faults.signal(self.engine, self.part, signal.SIGKILL)


class Freeze(Struct, frozen=True):
    """SIGSTOP all processes of an engine (or those with ``part``), for ``seconds`` (None: for good)."""

    engine: int
    part: str = ""
    seconds: float | None = None

    def strike(self, faults: "Faults") -> None:
        """Do it, now."""
        faults.signal(self.engine, self.part or None, signal.SIGSTOP)
        if self.seconds is not None:
            faults.do(self._thaw(self.seconds, faults))

    async def _thaw(self, seconds: float, faults: "Faults") -> None:
        await asyncio.sleep(seconds)
        faults.signal(self.engine, self.part or None, signal.SIGCONT)


class Slow(Struct, frozen=True):
    """From now on an engine's processes run for one of ``times`` parts of the time, and stand still for the rest."""

    engine: int
    times: int = 5
    run_s: float = 0.02

    def strike(self, faults: "Faults") -> None:
        """Do it, now."""
        faults.do(self._throttle(faults))

    async def _throttle(self, faults: "Faults") -> None:
        try:
            while True:
                faults.signal(self.engine, None, signal.SIGSTOP)
                await asyncio.sleep(self.run_s * (self.times - 1))
                faults.signal(self.engine, None, signal.SIGCONT)
                await asyncio.sleep(self.run_s)
        finally:
            faults.signal(self.engine, None, signal.SIGCONT)


class RefuseFlush(Struct, frozen=True):
    """A request that nobody scheduled holds KV on an engine: its next flush is refused, and so is its sleep."""

    engine: int

    def strike(self, faults: "Faults") -> None:
        """Do it, now."""
        faults.do(faults.engine(self.engine).stray())


class FailBucket(Struct, frozen=True):
    """An engine's next copy of bucket ``index`` raises."""

    engine: int
    index: int

    def strike(self, faults: "Faults") -> None:
        """Do it, now."""
        faults.engine(self.engine).bad_bucket = self.index


class Delay(Struct, frozen=True):
    """Keep all that an engine says until the next publish; for ``most_s`` if the publish waits for that."""

    engine: int
    most_s: float = 2.0

    def strike(self, faults: "Faults") -> None:
        """Do it, now."""
        faults.engine(self.engine).hush()
        faults.do(self._release(faults))

    async def _release(self, faults: "Faults") -> None:
        await faults.published(self.most_s)
        faults.engine(self.engine).speak()


class Faults:
    """Strikes a rig with faults, each once at its moment; ``struck`` says at which lines. Pass it as ``watch``."""

    def __init__(self, rig: Rig, plan: Sequence[tuple[Moment, Fault]]) -> None:
        self.struck: list[tuple[Line, Fault]] = []
        self._rig = rig
        self._plan = list(plan)
        self._tasks: set[asyncio.Task[None]] = set()
        self._publish = asyncio.Event()

    def __call__(self, line: Line) -> None:
        """Look at one line of the history."""
        if isinstance(line, Publish):
            self._publish.set()
        for moment, fault in [due for due in self._plan if due[0](line)]:
            self._plan.remove((moment, fault))
            self._publish.clear()
            self.struck.append((line, fault))
            fault.strike(self)

    def engine(self, number: int) -> FaultyEngine:
        """An engine of the rig."""
        client = self._rig.engines[number]
        assert isinstance(client, FaultyEngine), "start the rig with engine=FaultyEngine"
        return client

    def do(self, work: Awaitable[None]) -> None:
        """Let a fault take its course."""

        async def done() -> None:
            await work

        task = asyncio.ensure_future(done())
        self._tasks.add(task)

    async def published(self, most_s: float) -> bool:
        """Wait for the next publish; whether it came within so many seconds."""
        try:
            async with asyncio.timeout(most_s):
                await self._publish.wait()
        except TimeoutError:
            return False
        return True

    def signal(self, engine: int, part: str | None, what: signal.Signals) -> None:
        """Send a signal to an engine's process ("": alone; None: with all its descendants) or to one with ``part``."""
        child = self._rig.engines[engine].child
        if not child.alive:
            return
        first, *others = processes.descendants(child.pid)
        chosen = [first] if part == "" else [first, *others] if part is None else [p for p in others if part in line(p)]
        for pid in chosen:
            try:
                os.kill(pid, what)
            except ProcessLookupError:
                continue

    async def heal(self) -> None:
        """End what goes on: let all run and speak again. What has died stays dead until the rig's next reset."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for number in self._rig.engines:
            self.signal(number, None, signal.SIGCONT)
            self.engine(number).speak()


def line(pid: int) -> str:
    """A process's command line, or its title if it has given itself one."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""
