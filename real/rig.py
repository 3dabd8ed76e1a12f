"""The rig: engine and trainer processes that stay up from run to run, and the transports between them."""

import asyncio
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from msgspec.structs import replace

from rlsched.commands import Part, Tag, Transport
from rlsched.errors import InputError
from rlsched.facts import Resident
from rlsched.manifest import Manifest
from rlsched.shape import Device

from . import answers
from .child import ChildDied
from .client import EngineClient, TrainerClient
from .devices import nth
from .installs import RECIPES, require
from .janitor import Janitor
from .setup import Setup
from .transport import BroadcastBuckets, Buckets, Checkpoints, SharedBuckets

BUCKET = 1 << 26
"""Bytes of a bucket where no policy names them: in set-up and probes."""


class Rig:
    """``engines`` by number and one ``trainer``; make it with ``start``, end it with ``close``."""

    def __init__(self, setup: Setup, engine: type[EngineClient] = EngineClient) -> None:
        self.setup = setup
        self._kind = engine
        self.engines: dict[int, EngineClient] = {}
        self.trainer: TrainerClient
        self.cores = sorted(os.sched_getaffinity(0))
        self._recipe = RECIPES[setup.engine_kind]
        self._interpreter = require(setup.engine_kind, setup.interpreter).interpreter
        self._folder = tempfile.TemporaryDirectory(prefix="rlsched-", ignore_cleanup_errors=True)
        self._janitor = Janitor(Path(self._folder.name))
        self._shared: dict[int, SharedBuckets] = {}
        self._broadcast = BroadcastBuckets(timeout_s=setup.limits.control_s, overlap=setup.overlap)
        self._checkpoints = Checkpoints(Path(self._folder.name))
        self._asked = 0
        self._aside: dict[str, tuple[int, asyncio.Future[answers.Ended]]] = {}
        self._resetting = False
        self.deaf()

    @classmethod
    async def start(
        cls,
        setup: Setup,
        engines: int,
        trainer: type[TrainerClient] = TrainerClient,
        engine: type[EngineClient] = EngineClient,
    ) -> Self:
        """Start the children and wait until all are ready. ``trainer``, ``engine``: the classes that drive them."""
        rig = cls(setup, engine)
        work = (rig._train(trainer), *(rig._engine(e) for e in range(engines)))
        starting = [asyncio.ensure_future(one) for one in work]
        try:
            await asyncio.gather(*starting)
            rig.engines = dict(sorted(rig.engines.items()))
        except BaseException:
            for one in starting:
                one.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
            await rig.close()
            raise
        return rig

    async def _engine(self, id: int) -> None:
        self.engines[id] = await self._kind.start(
            f"engine-{id}",
            replace(self.setup.engine, device=nth(self.setup.engine.device, id)),
            Path(self._folder.name),
            module=self._recipe.module,
            interpreter=self._interpreter,
            environment=self._recipe.environment,
            on_ended=lambda told: self._ended(id, told),
            on_down=lambda error: self._fell(id, error),
            limits=self.setup.limits,
        )

    async def _train(self, kind: type[TrainerClient]) -> None:
        self.trainer = await kind.start(
            "trainer",
            self.setup.trainer,
            Path(self._folder.name),
            on_phase=lambda told: self._on_phase(told),
            on_down=lambda error: self._on_down(None, error),
            limits=self.setup.limits,
        )

    def listen(
        self,
        on_ended: Callable[[int, answers.Ended], None],
        on_phase: Callable[[answers.Phase], None],
        on_down: Callable[[int | None, ChildDied], None],
    ) -> None:
        """Tell these from now on what the children say unasked."""
        self._on_ended, self._on_phase, self._on_down = on_ended, on_phase, on_down

    def deaf(self) -> None:
        """Tell nobody."""
        self.listen(lambda _, __: None, lambda _: None, lambda _, __: None)

    def _ended(self, engine: int, told: answers.Ended) -> None:
        if told.rollout not in self._aside:
            if not self._resetting:  # a request of the run before is nobody's
                self._on_ended(engine, told)
            return
        _, future = self._aside[told.rollout]
        if not future.done():
            future.set_result(told)

    def _fell(self, engine: int, error: ChildDied) -> None:
        for on, future in self._aside.values():
            if on == engine and not future.done():
                future.set_exception(error)
        self._on_down(engine, error)

    async def ask(self, engine: int, requests: Sequence[list[int]], length: int) -> list[answers.Ended]:
        """Generate at most ``length`` tokens for each request, beside what is scheduled: who listens isn't told."""
        client, loop = self.engines[engine], asyncio.get_running_loop()
        names = [f"aside-{self._asked + i}" for i in range(len(requests))]
        self._asked += len(requests)
        futures = [loop.create_future() for _ in names]
        self._aside.update({name: (engine, future) for name, future in zip(names, futures, strict=True)})
        try:
            submits = (client.submit(n, r, length, forced=False) for n, r in zip(names, requests, strict=True))
            # Together, so that no failure is left behind unread when the engine dies.
            told = await asyncio.gather(*submits, *futures)
            return [end for end in told if end is not None]
        finally:
            for name in names:
                del self._aside[name]

    async def reset(self, manifest: Manifest) -> dict[int, int]:
        """Make ready for a run: cores by the layout, version 0 installed on every engine; its bytes there.

        An engine that died since the last run is started again.
        """
        wanted = sorted(d.engine for d in manifest.devices if d.engine is not None)
        if wanted != sorted(self.engines):
            raise InputError(
                f"policy {manifest.policy.name} lays out {len(wanted)} engines, but {len(self.engines)} are up;"
                " start with the number it needs"
            )
        fallen = {id: client for id, client in self.engines.items() if not client.child.alive}
        for id, client in fallen.items():
            await client.close()
            await self._engine(id)
        cores = deal(self.cores, len(manifest.devices))
        for d in manifest.devices:
            if d.engine is not None:
                self.engines[d.engine].set_cpus(cores[d.id])
        self.trainer.set_cpus(sorted({c for d in manifest.devices if d.trainer for c in cores[d.id]}))
        engines = list(self.engines.values())
        # A reset child leaves its group. It is formed again here: in a run it would count as the first transfer's.
        await self._broadcast.close()
        self._resetting = True
        try:
            for client in engines:
                await client.abort()
                await client.reset(manifest.seed)
                await client.pause()
        finally:
            self._resetting = False
        await self.trainer.reset(manifest.seed)
        pushed = await self.transport("ipc", BUCKET).push(self.trainer, engines, 0)
        if pushed.failed:
            raise next(iter(pushed.failed.values()))
        await self._broadcast.prepare(self.trainer, engines)
        for client in engines:
            await client.resume()
        return {e: pushed.updated[client.name].bytes for e, client in self.engines.items()}

    def transport(self, kind: Transport, bucket: int) -> Buckets:
        """The transport of that kind, with buckets of that many bytes. A rig has one broadcast group and one folder."""
        if kind != "ipc":
            single = self._broadcast if kind == "broadcast" else self._checkpoints
            single.bucket_bytes = bucket
            return single
        if bucket not in self._shared:
            self._shared[bucket] = SharedBuckets(bucket)
        return self._shared[bucket]

    def engine_bytes(self, engine: int) -> dict[Tag, int]:
        """Bytes of an engine's weights and of its KV cache when awake."""
        client, model = self.engines[engine], self.setup.engine.model
        width = 8 if model.dtype == "float64" else 4 if model.dtype == "float32" else 2
        kv = client.capabilities.kv_tokens * model.layers * 2 * model.kv_heads * model.head_dim * width
        return {"weights": client.parameter_bytes, "kv": kv}

    def residents(self, devices: list[Device]) -> list[Resident]:
        """What is where when a run begins."""
        found: list[Resident] = []
        for d in devices:
            if d.engine is not None:
                sizes = self.engine_bytes(d.engine)
                found += [Resident(0, 0, d.id, "engine", part, size) for part, size in sizes.items()]
        return [*found, *self.trainer_residents(devices, ["parameters", "optimizer"], 0, 0, away=False)]

    def trainer_residents(
        self, devices: list[Device], parts: list[Part], t: int, by: int, away: bool
    ) -> list[Resident]:
        """What the trainer holds; ``away``: the parts left its devices. On a CPU they never do: host is device."""
        shards = [d.id for d in devices if d.trainer]
        sizes: dict[Part, int] = {
            "parameters": self.trainer.parameter_bytes,
            "optimizer": 2 * self.trainer.parameter_bytes,
        }
        return [
            Resident(t, by, d, "trainer", part, 0 if away else sizes[part] // len(shards))
            for part in parts
            for d in shards
        ]

    async def counts(self) -> dict[str, answers.Counted]:
        """Pacing overruns and memory of the processes that live, by name."""
        clients: list[EngineClient | TrainerClient] = [*self.engines.values(), self.trainer]
        found = await asyncio.gather(*(c.count() for c in clients), return_exceptions=True)
        return {c.name: told for c, told in zip(clients, found, strict=True) if isinstance(told, answers.Counted)}

    async def close(self) -> None:
        """End and reap every process, and let go of the transports."""
        self.deaf()
        # Processes first: one that hangs can't be asked to leave a group.
        clients = [*self.engines.values(), *([self.trainer] if hasattr(self, "trainer") else [])]
        await asyncio.gather(*(c.close() for c in clients), return_exceptions=True)
        for transport in (self._broadcast, self._checkpoints, *self._shared.values()):
            await transport.close()
        self._folder.cleanup()
        await asyncio.to_thread(self._janitor.close)


def deal(cores: list[int], devices: int) -> list[list[int]]:
    """Cores of each device: disjoint while there are enough, and all of them for a single one."""
    if devices >= len(cores):
        return [[cores[d % len(cores)]] for d in range(devices)]
    share = len(cores) // devices
    return [cores[d * share : (d + 1) * share] for d in range(devices)]
