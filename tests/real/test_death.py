"""Children die: the parent knows within a second, nobody hangs, and nothing is left behind."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlsched.errors import InputError
from rlsched.real import processes
from rlsched.real.child import Child, ChildDied
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.limits import Limits
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
    segments = processes.segments(os.getpid(), set())

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
    assert processes.segments(os.getpid(), set()) == segments
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
    limits = Limits(control_s=2.0)
    engines = [fresh_rig.engine(name, EngineConfig(pace=SLOW_BUCKETS), limits=limits) for name in ("one", "two")]
    trainer = fresh_rig.trainer("trainer", TrainerConfig(), limits=limits)
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
        except ChildDied as error:
            return {"trainer": error}

    failed = fresh_rig.run(stop())
    victim = "one" if who == "engine" else "trainer"
    assert isinstance(failed[victim], ChildDied)
    assert re.search(r"did not answer \w+ in \d s|was stopped by a signal for 2 s", str(failed[victim]))
    assert gone(pid)
    if who == "engine":
        assert isinstance(failed["two"], TornWeights)
        with pytest.raises(Exception, match="whole"):
            fresh_rig.run(engines[1].resume())


HANGING = """
import time
import rlsched.real.engines.transformers as engine
from rlsched.real.model import build
def hanging(*spec):
    model = build(*spec)
    steps = []
    def hook(*_):
        steps.append(0)
        if len(steps) > 5: time.sleep(3600)
    model.register_forward_pre_hook(hook)
    return model
engine.build = hanging
engine.run(engine.main)
"""


@pytest.mark.parametrize("asked", [True, False])
def test_an_engine_that_hangs_in_a_step_is_found_out(fresh_rig, prompt, tmp_path, monkeypatch, asked):
    """By the first order that it doesn't answer; or, if nobody has one, by being asked for a sign of life."""
    (tmp_path / "hanging_engine.py").write_text(HANGING)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    limits = Limits(control_s=2.0, beat_s=600.0 if asked else 0.5)
    engine = fresh_rig.engine("hanging", EngineConfig(), module="hanging_engine", limits=limits)

    async def hang():
        await engine.submit("r", prompt(0), 100)
        if asked:
            await asyncio.sleep(1.0)
            with pytest.raises(ChildDied, match="did not answer Pause in 2 s"):
                await engine.pause()
        await eventually(lambda: fresh_rig.deaths, timeout=60.0)

    fresh_rig.run(hang())
    (death,) = fresh_rig.deaths
    assert f"did not answer {'Pause' if asked else 'Ping'} in 2 s" in str(death)
    assert gone(engine.child.pid)


def test_an_idle_engine_gives_signs_of_life(fresh_rig):
    engine = fresh_rig.engine("idle", EngineConfig(), limits=Limits(control_s=5.0, beat_s=0.05))
    fresh_rig.run(asyncio.sleep(1.0))
    fresh_rig.run(engine.count())
    assert not fresh_rig.deaths


def test_a_child_that_does_not_start_is_given_up(fresh_rig, tmp_path, monkeypatch):
    (tmp_path / "deaf_engine.py").write_text(
        "from rlsched.real.child import adopt\nimport time\nadopt(), time.sleep(600)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(ChildDied, match="did not answer Load in 2 s"):
        fresh_rig.engine("deaf", EngineConfig(), module="deaf_engine", limits=Limits(start_s=2.0))


def test_limits_are_over_zero():
    with pytest.raises(InputError, match=r"limits\.beat_s is 0: it must be over 0 seconds"):
        Limits(beat_s=0)


def test_a_parent_that_stood_still_itself_holds_nobody_for_dead(tmp_path):
    script = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from rlsched.real.client import EngineClient\n"
        "from rlsched.real.config import EngineConfig\n"
        "from rlsched.real.limits import Limits\n"
        "async def main():\n"
        "    limits = Limits(control_s=1.5, beat_s=0.01)\n"
        "    engine = await EngineClient.start('e', EngineConfig(), Path(sys.argv[1]), limits=limits)\n"
        "    print('up', flush=True)\n"
        "    await asyncio.to_thread(sys.stdin.readline)\n"
        "    await engine.count()\n"
        "    await engine.close()\n"
        "    print('well', flush=True)\n"
        "asyncio.run(main())\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"up\n"
        for _ in range(2):
            parent.send_signal(signal.SIGSTOP)
            time.sleep(3.0)
            parent.send_signal(signal.SIGCONT)
            time.sleep(0.5)
        parent.stdin.write(b"\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == b"well\n"


def test_dead_loop_is_reported_and_the_child_exits_non_zero(fresh_rig, prompt, tmp_path, monkeypatch):
    """An engine whose model raises in the middle of a step."""
    (tmp_path / "broken_engine.py").write_text(
        "import rlsched.real.engines.transformers as engine\n"
        "from rlsched.real.model import build\n"
        "def broken(*spec):\n"
        "    model = build(*spec)\n"
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
    with subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE) as parent:
        pid = int(parent.stdout.readline())
        segments = processes.segments(parent.pid, set())
        parent.kill()
    asyncio.run(eventually(lambda: gone(pid)))
    assert not [path for path in segments if path.exists()]


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


HOLDING = """
import multiprocessing, os, subprocess
from multiprocessing import resource_tracker, shared_memory
held = shared_memory.SharedMemory(create=True, size=4096)
# A tracker would remove it; one that is killed doesn't.
resource_tracker.unregister(held._name, 'shared_memory')
lock = multiprocessing.get_context('spawn').Lock()
grandchild = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])
connection.send(f'{grandchild.pid} {held.name}'.encode())
time.sleep(600)
"""


@pytest.mark.parametrize("end", ["killed", "condemned", "closed"])
def test_with_a_child_ends_all_that_it_has_started_and_held(light, end):
    before = set(Path("/dev/shm").iterdir())
    child = light(HOLDING)
    grandchild, name = child.socket.recv(100).decode().split()
    held = Path("/dev/shm", name)
    assert held.exists()
    child.look()
    mine = processes.segments(child.pid, before)
    assert held in mine
    assert len(mine) == 2  # the lock's semaphore has a name, too
    if end == "killed":
        child.kill()
        assert child.death().status == "signal SIGKILL"
    elif end == "condemned":
        child.condemn("for a test")
        assert child.death().status == "for a test"
    else:
        asyncio.run(child.close(0.1))
    assert not processes.members(child.pid)
    asyncio.run(eventually(lambda: gone(int(grandchild))))
    assert not [path for path in mine if path.exists()]


def test_a_stopped_child_is_closed_at_once(light):
    child = light("connection.send(b'x'); connection.recv(1)")
    child.socket.recv(1)
    child.signal(signal.SIGSTOP)
    asyncio.run(eventually(lambda: child.stopped))
    asyncio.run(child.close(600.0))
    assert child.death().status == "signal SIGKILL"


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
