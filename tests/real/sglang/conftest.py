"""One SGLang server for all tests of this folder: starting one takes half a minute on idle cores, and minutes on busy
ones. Its weights are random, in the shapes of the canary weights, so that both can be brought to it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from rlsched.real import installs
from rlsched.real.client import EngineClient, TrainerClient
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.model import CANARY, build
from tests.real.conftest import Rig

MODULE = "rlsched.real.engines.sglang"
SHARING = "rlsched.real.engines.sglang_sharing"
START_S = 600.0
"""Longest start of an engine on a machine that others use, too."""
SPEC = msgspec.structs.replace(CANARY, weights="random")


class SglangRig(Rig):
    """A rig whose engines are SGLang's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.installed = installs.engine("sglang")
        if self.installed.ok:
            return
        if os.environ.get("RLSCHED_REQUIRE_ENGINES") == "1":
            pytest.fail(f"engine sglang: {self.installed.why}")
        pytest.skip(f"engine sglang: {self.installed.why}")

    def start(self, name: str, config: EngineConfig, module: str = MODULE) -> EngineClient:
        """Start an engine."""

        async def made() -> EngineClient:
            return await EngineClient.start(
                name,
                config,
                self.folder,
                module=module,
                interpreter=self.installed.interpreter,
                on_ended=lambda e: self.ended.__setitem__(e.rollout, e),
                on_down=self.deaths.append,
            )

        return self._keep(self.run(made(), START_S))

    async def begin(self, engine: EngineClient, count: int, **requests: tuple[list[int], int]) -> dict[str, int]:
        """Bring requests, each a prompt and a length, to `count` tokens or a few more, and leave the engine paused.

        Orders go out in pairs, so that no request runs away from this process. Should one run away from the engine's,
        on a very busy machine, and come past its half, all is begun again.
        """
        await engine.pause()
        await engine.abort(requests)
        for name, (tokens, length) in requests.items():
            await engine.submit(name, tokens, length)
        live = dict.fromkeys(requests, 0)
        while min(live.values()) < count:
            _, paused = await asyncio.gather(engine.resume(), engine.pause())
            live = paused.live
            if any(live.get(name, length) > length // 2 for name, (_, length) in requests.items()):
                return await self.begin(engine, count, **requests)
        for name in requests:
            self.ended.pop(name, None)
        return live


def server_of(client: EngineClient) -> list[int]:
    """Processes below an engine child."""
    found = [client.child.pid]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += [int(word) for word in (task / "children").read_text().split()]
    return found[1:]


def scheduler_of(client: EngineClient) -> int:
    """The process that steps."""
    return next(p for p in server_of(client) if b"scheduler" in Path(f"/proc/{p}/cmdline").read_bytes())


def said(client: EngineClient, what: str) -> list[str]:
    """Lines of the child's stderr."""
    return [line for line in client.child.stderr.read_text().splitlines() if what in line]


@pytest.fixture(scope="session")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SglangRig]:
    made = SglangRig(tmp_path_factory.mktemp("sglang"))
    yield made
    made.close()


@pytest.fixture(scope="session")
def start_engine(rig: SglangRig) -> Callable[[], EngineClient]:
    """The one server, started when it is asked for first, and again after its death."""
    torch.set_num_threads(1)  # of plain transformers, in this process: two on a busy machine wait for each other
    config = EngineConfig(model=SPEC, temperature=0.0, kv_blocks=128, page_size=16, max_batch_tokens=64)
    started: list[EngineClient] = []

    def engine() -> EngineClient:
        if not started or not started[-1].child.alive:
            started.append(rig.start(f"sglang-{len(started)}", config))
        return started[-1]

    return engine


@pytest.fixture
def engine(rig: SglangRig, start_engine: Callable[[], EngineClient]) -> EngineClient:
    """It, idle at version 0."""
    engine = start_engine()
    rig.run(engine.abort())
    rig.run(engine.reset(0))
    rig.ended.clear()
    return engine


@pytest.fixture(scope="session")
def model() -> Any:
    return build(SPEC)


@pytest.fixture(scope="session")
def greedy(greedy: Callable[[Any, list[int], int], list[int]]) -> Callable[[Any, list[int], int], list[int]]:
    """Plain transformers' greedy continuation; each is computed once, as the tests ask for it at many lengths."""
    known: dict[tuple[Any, tuple[int, ...]], list[int]] = {}

    def generate(model: Any, tokens: list[int], length: int) -> list[int]:
        key = (model, tuple(tokens))
        if len(known.get(key, [])) < length:
            known[key] = greedy(model, tokens, length)
        return known[key][:length]

    return generate


@pytest.fixture(scope="session")
def trainer(rig: SglangRig) -> TrainerClient:
    return rig.trainer("trainer", TrainerConfig(model=SPEC, lr=1e-2))
