"""Children for the tests of the real world: expensive to start, so shared by a module's tests, and always reaped."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("RLSCHED_REQUIRE_ENGINES") != "1":
    pytest.importorskip("torch")
    pytest.importorskip("transformers")

from rlsched.real.answers import Ended, Phase
from rlsched.real.child import ChildDied
from rlsched.real.client import EngineClient, TrainerClient
from rlsched.real.config import EngineConfig, TrainerConfig

BOS = 1


class Rig:
    """One event loop, the children that live in it, and all that they said."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ended: dict[str, Ended] = {}
        self.phases: list[Phase] = []
        self.deaths: list[ChildDied] = []
        self.clients: list[EngineClient | TrainerClient] = []
        self._runner = asyncio.Runner()

    def run(self, work: Awaitable[Any], timeout: float = 120.0) -> Any:
        """Run to the end. The timeout only turns a hang into a failure."""

        async def bounded() -> Any:
            async with asyncio.timeout(timeout):
                return await work

        return self._runner.run(bounded())

    def engine(self, name: str, config: EngineConfig, **options: Any) -> EngineClient:
        start = EngineClient.start(
            name,
            config,
            self.folder,
            on_ended=lambda e: self.ended.__setitem__(e.rollout, e),
            on_down=self.deaths.append,
            **options,
        )
        return self._keep(self.run(start))

    def trainer(self, name: str, config: TrainerConfig, **options: Any) -> TrainerClient:
        start = TrainerClient.start(
            name, config, self.folder, on_phase=self.phases.append, on_down=self.deaths.append, **options
        )
        return self._keep(self.run(start))

    def _keep(self, client: Any) -> Any:
        self.clients.append(client)
        return client

    async def end_of(self, *rollouts: str) -> list[Ended]:
        """Wait for the ends of requests."""
        while not all(rollout in self.ended for rollout in rollouts):
            if self.deaths:
                raise self.deaths[0]
            await asyncio.sleep(0.002)
        return [self.ended[rollout] for rollout in rollouts]

    async def generate(self, engine: EngineClient, name: str, prompt: list[int], length: int) -> Ended:
        await engine.submit(name, prompt, length)
        return (await self.end_of(name))[0]

    async def until_generated(self, engine: EngineClient, count: int) -> dict[str, int]:
        """Pause at a moment at which every live request has at least `count` tokens."""
        while True:
            progress = await engine.pause()
            if progress.live and min(progress.live.values()) >= count:
                return progress.live
            await engine.resume()
            await asyncio.sleep(0.005)

    def close(self) -> None:
        async def close_all() -> None:
            await asyncio.gather(*(client.close() for client in self.clients))

        try:
            self.run(close_all())
        finally:
            self._runner.close()
        assert all(gone(client.child.pid) for client in self.clients)


def gone(pid: int) -> bool:
    """Whether no process, zombie included, has this id."""
    return not Path(f"/proc/{pid}").exists()


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    made = Rig(tmp_path_factory.mktemp("run"))
    yield made
    made.close()


@pytest.fixture
def fresh_rig(tmp_path: Path) -> Iterator[Rig]:
    """For tests whose children don't survive them."""
    made = Rig(tmp_path)
    yield made
    made.close()


@pytest.fixture
def prompt() -> Callable[[int], list[int]]:
    """Prompts that differ from their first symbol on."""
    return lambda index: [BOS, 8 + index % 8, 8 + (3 * index + 1) % 8, 8 + (index // 8) % 8]


@pytest.fixture(scope="session")
def greedy() -> Callable[[Any, list[int], int], list[int]]:
    """Plain transformers: the greedy continuation of a prompt."""
    import torch

    def generate(model: Any, tokens: list[int], length: int) -> list[int]:
        with torch.no_grad():
            ids = torch.tensor([tokens])
            out = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=length, pad_token_id=0
            )
        return out[0, len(tokens) :].tolist()

    return generate
