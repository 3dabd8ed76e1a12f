"""A server that stands still, or dies: noticed, named, and nothing of it left behind."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlsched.real.channel import CommandFailed
from tests.real.sglang.conftest import scheduler_of, server_of

pytestmark = [pytest.mark.real, pytest.mark.timeout(1800)]


def running(pid: int) -> bool:
    """Whether a process runs: a zombie of another parent's doesn't."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


async def gone(pids: list[int]) -> None:
    while any(running(pid) for pid in pids):
        await asyncio.sleep(0.05)


def test_a_scheduler_that_stands_still_is_named(rig, engine, prompt):
    scheduler = scheduler_of(engine)
    os.kill(scheduler, signal.SIGSTOP)
    try:
        with pytest.raises(CommandFailed, match=f"SGLang scheduler has not answered for 20 s; stopped: {scheduler}"):
            rig.run(engine.count(), 300)
    finally:
        os.kill(scheduler, signal.SIGCONT)
    # It asks, and changes nothing: the engine lives on.
    assert len(rig.run(rig.generate(engine, "r", prompt(0), 5)).tokens) == 5
    assert rig.run(engine.count()).rss


@pytest.mark.nightly
def test_a_control_that_is_not_answered_is_the_engines_end(rig, engine, prompt):
    server = server_of(engine)
    os.kill(scheduler_of(engine), signal.SIGSTOP)

    async def dies():
        with pytest.raises(CommandFailed, match="for 60 s the SGLang scheduler did not pause; stopped: "):
            await engine.pause()
        while not rig.deaths:
            await asyncio.sleep(0.05)
        await gone(server)

    rig.run(dies(), 300)
    rig.deaths.clear()


def test_a_killed_scheduler_is_the_engines_death(rig, engine):
    server = server_of(engine)
    assert len(server) >= 3
    os.kill(scheduler_of(engine), signal.SIGKILL)

    async def dies():
        while not rig.deaths:
            await asyncio.sleep(0.05)
        await gone(server)

    rig.run(dies(), 120)
    assert rig.deaths[0].name == engine.name
    rig.deaths.clear()
