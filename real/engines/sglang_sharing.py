"""SGLang without rlsched's guards, its prefix cache on, as a careless integration has it; for canary tests only.

Requests share the KV of equal prefixes, and an update that nobody flushes after leaves KV of older weights there: the
same prompt meets it again. Not refused are an update that ends with bytes missing and generation with weights that are
not whole. Outside a pause each bucket goes into the server by itself, in a short pause of its own: SGLang would else
keep it waiting until no request runs. An abort by name inside a pause is SGLang's own: a request that runs ends with
its next step.

Run as `python -m rlsched.real.engines.sglang_sharing --fd N --parent PID`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from .. import answers, commands
from .hosted import main
from .sglang import SglangEngine


class SharingEngine(SglangEngine):
    """An engine whose updates want a flush, and care."""

    sharing = True
    _missing = 0
    _coming = 0

    async def _execute(self, command: commands.Command) -> answers.Result:
        if isinstance(command, commands.Abort) and command.rollouts is not None and self._driver.paused:
            live = self._driver.look()
            late = [rollout for rollout in command.rollouts if rollout in live]
            for rollout in late:
                await self._driver.server.post("/abort_request", {"rid": live[rollout].rid})
            return answers.Aborted(late)
        return await super()._execute(command)

    def _require_pause(self) -> None:
        pass

    def _begin_update(self, version: int) -> answers.Done:
        done = super()._begin_update(version)
        self._missing, self._coming = self._weights.nbytes, version
        self._landing.usable = True
        return done

    async def _take(self, copy: Callable[[], int]) -> answers.Moved:
        moved = await super()._take(copy)
        self._missing -= moved.bytes
        self._landing.transports = {"shared"}  # as it is here; a checkpoint would be read whole
        if not self._driver.paused:
            async with self._standing():
                await self._driver.install(self._coming)
        return moved

    async def _end_update(self, version: int) -> answers.Updated:
        self._landing.received(self._missing)
        if self._driver.paused:
            return await super()._end_update(version)
        async with self._standing():
            return await super()._end_update(version)

    @asynccontextmanager
    async def _standing(self) -> AsyncIterator[None]:
        await self._driver.pause()
        try:
            yield
        finally:
            await self._driver.resume()

    async def _sleep(self, level: int) -> answers.Slept:
        slept = await super()._sleep(level)
        self._landing.usable = True
        return slept


if __name__ == "__main__":
    main(SharingEngine)
