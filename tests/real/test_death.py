"""Children die: the parent knows within a second, nobody hangs, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsched.real.child import Child, ChildDied
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.pacing import EnginePace, WorkCost
from rlsched.real.transport import BroadcastBuckets, SharedBuckets, TornWeights

pytestmark = pytest.mark.real

SLOW_BUCKETS = EnginePace(bucket=WorkCost(fixed=50_000_000))


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


async def eventually(condition, timeout=10.0):
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.02)


def test_killed_engine_is_told_everywhere_and_leaves_nothing(fresh_rig, prompt):
    engine = fresh_rig.engine("engine", EngineConfig(pace=SLOW_BUCKETS))
    trainer = fresh_rig.trainer("trainer", TrainerConfig())
    transport = SharedBuckets(4096)
    segments = set(Path("/dev/shm").iterdir())

    async def kill():
        await engine.submit("r", prompt(0), 1000)
        await engine.pause()
        push = asyncio.ensure_future(transport.push(trainer, [engine], 0))
        await asyncio.sleep(0.3)
        pending = asyncio.ensure_future(engine.count())
        os.kill(engine.child.pid, signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(ChildDied, match="SIGKILL") as death:
            await pending
        with pytest.raises(ChildDied):
            await engine.pause()
        pushed = await push
        took = time.monotonic() - began
        await transport.close()
        return death.value, pushed, took

    death, pushed, took = fresh_rig.run(kill())
    assert (death.name, death.pid, death.status) == ("engine", engine.child.pid, "signal SIGKILL")
    assert isinstance(pushed.failed["engine"], ChildDied)
    assert took < 1.0
    assert [d.name for d in fresh_rig.deaths] == ["engine"]
    assert gone(engine.child.pid)
    assert set(Path("/dev/shm").iterdir()) == segments
    fresh_rig.run(trainer.checksum())  # the trainer lives


def test_killed_trainer_in_mid_broadcast_is_an_error_and_the_engine_refuses_to_generate(fresh_rig):
    engine = fresh_rig.engine("engine", EngineConfig(pace=SLOW_BUCKETS))
    trainer = fresh_rig.trainer("trainer", TrainerConfig())
    transport = BroadcastBuckets(4096, timeout_s=5.0)

    async def kill():
        await engine.pause()
        push = asyncio.ensure_future(transport.push(trainer, [engine], 0))
        await asyncio.sleep(0.5)
        assert not push.done()
        os.kill(trainer.child.pid, signal.SIGKILL)
        began = time.monotonic()
        try:
            failed = (await push).failed
        except ChildDied as death:
            failed = {"trainer": death}
        took = time.monotonic() - began
        with pytest.raises(Exception, match="whole"):
            await engine.resume()
        return failed, took

    failed, took = fresh_rig.run(kill())
    assert failed
    assert took < 6.0

    # The run goes on with a new trainer and a new group.
    successor = fresh_rig.trainer("successor", TrainerConfig())
    fresh_rig.deaths.clear()

    async def recover():
        pushed = await transport.push(successor, [engine], 0)
        await engine.resume()
        await transport.close()
        return pushed

    assert not fresh_rig.run(recover()).failed


@pytest.mark.parametrize("who", ["engine", "trainer"])
def test_stopped_peer_is_an_error_in_seconds(fresh_rig, who):
    engines = [fresh_rig.engine(name, EngineConfig(pace=SLOW_BUCKETS)) for name in ("one", "two")]
    trainer = fresh_rig.trainer("trainer", TrainerConfig())
    transport = BroadcastBuckets(4096, timeout_s=2.0)
    pid = (engines[0] if who == "engine" else trainer).child.pid

    async def stop():
        await asyncio.gather(*(engine.pause() for engine in engines))
        await transport.prepare(trainer, engines)
        push = asyncio.ensure_future(transport.push(trainer, engines, 0))
        await asyncio.sleep(0.5)
        assert not push.done()
        os.kill(pid, signal.SIGSTOP)
        try:
            return (await push).failed
        except TimeoutError as error:
            return {"trainer": error}
        finally:
            os.kill(pid, signal.SIGCONT)

    began = time.monotonic()
    failed = fresh_rig.run(stop())
    assert time.monotonic() - began < 15.0
    assert failed
    if who == "engine":
        assert isinstance(failed["one"], TimeoutError)
        assert isinstance(failed["two"], TornWeights)


def test_dead_loop_is_reported_and_the_child_exits_non_zero(fresh_rig, prompt, tmp_path, monkeypatch):
    """An engine whose model raises in the middle of a step."""
    (tmp_path / "broken_engine.py").write_text(
        "import rlsched.real.engines.transformers as engine\n"
        "from rlsched.real.model import build\n"
        "def broken(spec):\n"
        "    model = build(spec)\n"
        "    steps = []\n"
        "    def hook(*_):\n"
        "        steps.append(0)\n"
        "        if len(steps) > 5: raise ValueError('the model is broken')\n"
        "    model.register_forward_pre_hook(hook)\n"
        "    return model\n"
        "engine.build = broken\n"
        "engine.run(engine.main)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    engine = fresh_rig.engine("broken", EngineConfig(), module="broken_engine")

    async def die():
        await engine.submit("r", prompt(0), 100)
        await eventually(lambda: fresh_rig.deaths)
        with pytest.raises(ChildDied):
            await engine.count()

    fresh_rig.run(die())
    (death,) = fresh_rig.deaths
    assert death.status == "exit code 3"
    assert "the model is broken" in death.last_line


def test_children_die_with_a_killed_parent(tmp_path):
    """Even a SIGKILL of the parent leaves no process, and no shared memory that has a name."""
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from rlsched.real.client import TrainerClient\n"
        "from rlsched.real.config import TrainerConfig\n"
        "from rlsched.real.transport import SharedBuckets\n"
        "async def main():\n"
        "    trainer = await TrainerClient.start('trainer', TrainerConfig(), Path(sys.argv[1]))\n"
        "    shared = SharedBuckets()\n"
        "    await trainer.pack(shared.path, shared.bucket_bytes, 0, 0)\n"
        "    print(trainer.child.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    segments = set(Path("/dev/shm").iterdir())
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        parent.kill()
    asyncio.run(eventually(lambda: gone(pid)))
    assert set(Path("/dev/shm").iterdir()) == segments


LIGHT = """
import sys, time
from rlsched.real.child import adopt
connection = adopt()
print("a warning", file=sys.stderr)
print("the last word", file=sys.stderr, flush=True)
{body}
"""


@pytest.fixture
def light(tmp_path):
    """A child that needs no torch; its body is given."""
    children = []

    def start(body):
        (tmp_path / "light.py").write_text(LIGHT.format(body=body))
        child = Child.start(
            "light", "light", tmp_path, environment={"PYTHONPATH": str(tmp_path)}, cpus=[min(os.sched_getaffinity(0))]
        )
        children.append(child)
        return child

    yield start
    for child in children:
        asyncio.run(child.close())
        assert gone(child.pid)


def test_exit_code_and_last_line_are_told(light):
    child = light("sys.exit(7)")
    assert asyncio.run(child.wait(20.0))
    assert str(child.death()) == f"light (pid {child.pid}) died: exit code 7; last stderr line: the last word"


def test_closing_the_socket_ends_a_child_that_listens(light):
    child = light("connection.recv(1)")
    asyncio.run(child.close(20.0))
    assert child.death().status == "exit code 0"


def test_a_child_that_does_not_listen_is_terminated_and_then_killed(light):
    body = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); connection.send(b'x'); time.sleep(600)"
    child = light(body)
    child.socket.recv(1)
    asyncio.run(child.close(0.1))
    assert child.death().status == "signal SIGKILL"


def test_all_threads_are_bound_and_rebound(light):
    body = (
        "import threading\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
        "connection.send(b'x'); connection.recv(1)"
    )
    child = light(body)
    child.socket.recv(1)

    def bindings():
        return [os.sched_getaffinity(int(task.name)) for task in Path(f"/proc/{child.pid}/task").iterdir()]

    assert bindings() == [{min(os.sched_getaffinity(0))}] * 4
    available = os.sched_getaffinity(0)
    child.set_cpus(available)
    assert bindings() == [available] * 4
