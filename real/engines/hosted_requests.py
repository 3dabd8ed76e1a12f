"""The live requests of a hosted engine: how far each has come, and under which version.

SGLang takes an id to be aborted for a prefix: `x-1` would end `x-10`, too. Here every request gets an id of its own, of
fixed width, so that none begins with another.
"""

from __future__ import annotations

import asyncio
from itertools import pairwise

import msgspec

from ..commands import Submit


class Request(msgspec.Struct):
    """One live request."""

    command: Submit
    rid: str
    sent: asyncio.Task[None] | None = None  # None: it waits here for the end of a pause
    queued: bool = False  # whether the scheduler has it
    made: int = 0  # tokens generated
    cuts: list[tuple[int, int]] = []  # version, and tokens made when the first step under it began
    reason: str = "abort"  # why it ended
    labels: list[tuple[int, int]] | None = None  # see `answers.Ended`
    cached: int | None = None  # see `answers.Ended`

    @property
    def version(self) -> int | None:
        """Installed when its computation began."""
        return self.cuts[0][0] if self.cuts else None

    def ended(self, tokens: list[int], said: str, eos: int | None) -> str:
        """Why it ended, as every engine says it. The step that an abort still lets it do may have been its last: SGLang
        calls it aborted then, and it is complete."""
        if not self.command.forced and tokens and tokens[-1] == eos:
            return "stop"
        if len(tokens) == self.command.max_new_tokens:
            return "length"
        return said

    def spans(self) -> list[tuple[int, int]]:
        """Versions and the numbers of tokens made under them, in order; none of one that never ran."""
        starts = [at for _, at in self.cuts]
        bounds = pairwise([*starts, self.made])
        return [(version, b - a) for (version, _), (a, b) in zip(self.cuts, bounds, strict=True) if b > a]


class Requests:
    """All live requests of an engine, by rollout and by the library's id."""

    def __init__(self) -> None:
        self.live: dict[str, Request] = {}
        self._by_rid: dict[str, Request] = {}
        self._added = 0

    def __contains__(self, rid: str) -> bool:
        return rid in self._by_rid

    def add(self, command: Submit) -> Request:
        """A new request."""
        self._added += 1
        request = Request(command, f"{self._added:012d}")
        self.live[command.rollout] = self._by_rid[request.rid] = request
        return request

    def remove(self, request: Request) -> None:
        """It has ended."""
        del self.live[request.command.rollout], self._by_rid[request.rid]

    def sent(self) -> list[Request]:
        """Those that are in the server, or on their way there."""
        return [request for request in self.live.values() if request.sent is not None]

    def taken(self, rid: str) -> None:
        """The scheduler has it."""
        if request := self._by_rid.get(rid):
            request.queued = True

    def stepped(self, made: dict[str, int], version: int) -> None:
        """A step under `version` is over; tokens that its requests have made."""
        for rid, count in made.items():
            if request := self._by_rid.get(rid):
                if not request.cuts or request.cuts[-1][0] != version:
                    request.cuts.append((version, request.made))
                request.made = count
