"""What all tests share: Hypothesis' profile, the shared data, the nightly tests, and a controller driven by hand."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from rlsched.commands import Abort, Command, Generate
from rlsched.controller import Controller
from rlsched.facts import Begin, Done, Installed, Scored, Segment
from rlsched.notes import Note
from rlsched.policy import Policy
from rlsched.shape import Shape

settings.register_profile("rlsched", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("rlsched")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests that take minutes, unless they are asked for."""
    if os.environ.get("RLSCHED_NIGHTLY") == "1":
        return
    for item in items:
        if item.get_closest_marker("nightly") is not None:
            item.add_marker(pytest.mark.skip(reason="takes minutes; set RLSCHED_NIGHTLY=1"))


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of recorded data and test vectors that are not part of the repository."""
    folder = os.environ.get("RLSCHED_DATA")
    if not folder:
        pytest.skip("set RLSCHED_DATA to the folder that holds areal_vectors.json")
    if not Path(folder).is_dir():
        pytest.fail(f"RLSCHED_DATA is {folder}: no such folder")
    return Path(folder)


class Hand:
    """A controller whose facts are told by hand, a nanosecond after each other.

    The default shape is one group of one sample a version, on one engine.
    """

    def __init__(self, policy: Policy, **shape: int) -> None:
        numbers = {"b": 1, "k": 1, "samples": 1, "steps": 3, "budget": 8, **shape}
        self.controller = Controller(policy, Shape(**numbers))
        self.ledger = self.controller.ledger
        self.now = 0
        self.home: dict[int, Generate] = {}
        """The command under which each rollout was sent last."""
        self.inside: dict[int, set[int]] = {}
        """Rollouts of each Generate that have not come back."""

    def tell(self, kind: Callable[..., Any], *fields: Any, **more: Any) -> list[Command | Note]:
        """Tell the next fact; what the controller answers."""
        self.now += 1
        out = self.controller.handle(kind(self.now, *fields, **more))
        for line in out:
            if isinstance(line, Generate):
                self.inside[line.id] = {work.rollout for work in line.work}
                self.home |= {work.rollout: line for work in line.work}
        return out

    def begin(self) -> list[Command | Note]:
        """Every engine holds version 0."""
        for engine in self.ledger.engines:
            self.tell(Installed, 0, engine, 0, 10)
        return self.tell(Begin)

    def done(self, *commands: Any) -> list[Command | Note]:
        """Answer commands, the last one with what follows."""
        out: list[Command | Note] = []
        for command in commands:
            out += self.tell(Done, command.id)
        return out

    def tokens(self, rollout: int, n: int = 4, end: str = "stop", version: int | None = None) -> list[Command | Note]:
        """A segment of a live rollout under the version that its engine holds, and the answer to its command."""
        home = self.home[rollout]
        if version is None:
            version = self.ledger.engines[home.engine].installed
        out = self.tell(Segment, home.id, rollout, home.engine, version, n, end, version)
        if end != "install":
            self.inside[home.id].remove(rollout)
            if not self.inside[home.id]:
                out += self.tell(Done, home.id)
        return out

    def finish(self, rollout: int, n: int = 4, **score: Any) -> list[Command | Note]:
        """The last segment of a rollout and its score."""
        return [*self.tokens(rollout, n), *self.tell(Scored, rollout, **score)]

    def aborted(self, command: Abort, n: int = 2) -> list[Command | Note]:
        """Each rollout of an abort comes back with ``n`` tokens more, and the abort is answered."""
        out: list[Command | Note] = []
        for rollout in command.rollouts:
            out += self.tokens(rollout, n, "abort")
        return out + self.tell(Done, command.id)

    def install(self, transfer: Any) -> list[Command | Note]:
        """The engines of a transfer hold its version whole, and it is answered."""
        for engine in transfer.engines:
            self.tell(Installed, transfer.id, engine, transfer.version, 10)
        return self.tell(Done, transfer.id)


@pytest.fixture
def hand() -> Callable[..., Hand]:
    """Makes a controller that is driven by hand: ``hand(policy, b=2, …)``."""
    return Hand
