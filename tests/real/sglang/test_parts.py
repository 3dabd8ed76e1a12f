"""What needs no server: records and orders on the link, silence, spans, and how a landing is flattened."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rlsched.real.commands import Submit
from rlsched.real.engines.family import Family
from rlsched.real.engines.hosted_requests import Request
from rlsched.real.engines.http import Silent, ask
from rlsched.real.engines.link import Link, Obeyed, Order, Taken, frame, unframe
from rlsched.real.engines.sglang_landing import SglangLanding
from rlsched.real.model import ModelSpec

pytestmark = pytest.mark.real


@pytest.mark.parametrize(
    ("cuts", "made", "spans"),
    [
        ([], 0, []),  # it never ran
        ([(3, 0)], 7, [(3, 7)]),
        ([(3, 0), (4, 5)], 7, [(3, 5), (4, 2)]),
        ([(3, 0), (4, 0), (5, 6)], 6, [(4, 6)]),  # a step that made nothing
    ],
)
def test_spans_follow_the_cuts(cuts, made, spans):
    request = Request(Submit("r", [1], 9), "1", cuts=cuts, made=made)
    assert request.spans() == spans
    assert request.version == (cuts[0][0] if cuts else None)


def test_messages_come_out_whole_however_they_are_cut():
    sent = b"".join(frame(Taken(f"{i:012d}")) for i in range(3))
    for cut in range(len(sent)):
        first, rest = unframe(sent[:cut])
        second, left = unframe(rest + sent[cut:])
        found = [msgspec.msgpack.decode(m, type=Taken).rid for m in (*first, *second)]
        assert (found, left) == ([f"{i:012d}" for i in range(3)], b"")


def test_an_order_is_carried_out_when_the_loop_comes_by():
    """A scheduler that answers its orders one by one, and the last one never."""
    seen: list[Order] = []

    def scheduler(address: str) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
            peer.connect(f"\0{address}")
            rest = b""
            while data := peer.recv(1 << 12):
                found, rest = unframe(rest + data)
                for message in found:
                    seen.append(msgspec.msgpack.decode(message, type=Order))
                    if len(seen) < 3:
                        peer.sendall(frame(Taken("x")) + frame(Obeyed(seen[-1].number)))

    async def ordered() -> list[str]:
        told: list[str] = []
        link = Link(lambda record: told.append(record.rid))
        thread = threading.Thread(target=scheduler, args=(link.address,))
        thread.start()
        await link.order()
        await link.order(seed=7)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await link.order()
        link.close()
        await asyncio.to_thread(thread.join)
        return told

    assert asyncio.run(ordered()) == ["x", "x"]
    assert seen == [Order(1), Order(2, 7), Order(3)]


def test_a_server_that_does_not_answer_is_silent():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        with pytest.raises(Silent, match=r"^/pause has not been answered for 0 s$"):
            asyncio.run(ask(server.getsockname()[1], "POST", "/pause", {}, 0.2))


def test_a_stopped_process_is_found():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    family = Family(process)
    try:
        assert family.stopped() == []
        os.kill(process.pid, signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        assert family.stopped() == [process.pid]
    finally:
        process.kill()
        process.wait()


def test_a_landing_is_flattened_with_wide_elements_first():
    import torch

    landing = SglangLanding(ModelSpec())
    odd = next(iter(landing.weights.parameters))
    landing.weights.parameters[odd].data = landing.weights.parameters[odd].data.to(torch.bfloat16)
    told = pickle.loads(base64.b64decode(landing.payload()))
    pieces, flat = told["metadata"], told["flattened_tensor"]
    assert sorted(p.name for p in pieces) == sorted(landing.weights.parameters)
    assert [p.start_idx for p in pieces] == [0, *(p.end_idx for p in pieces[:-1])]
    assert pieces[-1].end_idx == len(flat) == landing.weights.nbytes
    for p in pieces:
        assert p.start_idx % p.dtype.itemsize == 0
        found = flat[p.start_idx : p.end_idx].view(p.dtype).reshape(p.shape)
        assert torch.equal(found, landing.weights.parameters[p.name].detach())
    assert pieces[-1].name == odd


def test_an_update_knows_what_has_brought_it(tmp_path):
    landing = SglangLanding(ModelSpec())
    landing.begin_update(1)
    landing.comes("shared")
    landing.comes("disk", tmp_path)
    assert (landing.transports, landing.files) == ({"shared", "disk"}, {tmp_path})
    landing.begin_update(1)
    assert (landing.transports, landing.files) == (set(), set())
