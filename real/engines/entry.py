"""How an engine's child process begins and ends."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from .. import answers, commands, wire
from ..child import adopt
from ..config import EngineConfig
from .server import EngineServer

LOOP_DIED = 3
"""Exit code of a child whose working thread died."""


def main(kind: Callable[[EngineConfig, wire.Port], EngineServer]) -> int:
    """Serve one parent until it closes the socket; the exit code."""
    port = wire.Port(adopt())
    first = port.receive()
    if first is None or not isinstance(first.command, commands.Load):
        print("the first command must be Load", file=sys.stderr)
        return 2
    engine = kind(msgspec.convert(first.command.config, EngineConfig), port)
    port.send(wire.Answer(first.id, engine.loaded()))

    def read() -> None:
        while (call := port.receive()) is not None:
            engine.post(call)
        engine.close()

    threading.Thread(target=read, daemon=True).start()
    error = engine.serve()
    if error is None:
        return 0
    traceback.print_exception(error)
    port.notify(answers.Fatal(f"{type(error).__name__}: {error}"))
    return LOOP_DIED


def run(entry: Callable[[], int]) -> None:
    """Leave without the interpreter's teardown, which may wait for threads of a library."""
    code = entry()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
