"""Which rollouts are inside which engine, by which command, and what was told of those that stood in a pause.

An engine says how many tokens a live request has, and brings them home when it ends. What it had made at each pause
under one version is told then, so that the rest are later versions' tokens.
"""

from collections.abc import Callable

from msgspec import Struct

from rlsched.commands import Generate

from .rollouts import Span


class Stood(Struct):
    """A request that stood in a pause."""

    told: list[Span] = []
    """Tokens told of at its pauses, by the version that made them."""
    kv: int | None = None
    """The version that computed the KV which it stands on; None: it has told of no tokens since it has that KV."""
    retracted: bool = False
    """It lost the KV of before since."""

    @property
    def tokens(self) -> int:
        """How many were told of."""
        return sum(span.n for span in self.told)


class Home(Struct, frozen=True):
    """A request that came back: by which command it had been sent, and how its tokens are to be told."""

    by: int
    last: bool
    """None of that command's is left."""
    spans: list[Span]
    """All of its tokens, by version; the last span is what is still to be told."""
    kv: int
    """The version of the KV under the last span."""


class Requests:
    """The requests of a run that have not come back."""

    def __init__(self) -> None:
        self._cause: dict[int, int] = {}
        self._left: dict[int, set[int]] = {}
        self._engine: dict[int, int] = {}
        self._stood: dict[int, Stood] = {}

    def __contains__(self, rollout: int) -> bool:
        return rollout in self._cause

    def send(self, command: Generate) -> None:
        """The rollouts of ``command`` go to its engine."""
        self._engine[command.id] = command.engine
        self._left[command.id] = {work.rollout for work in command.work}
        self._cause.update((work.rollout, command.id) for work in command.work)

    def back(self, rollout: int, tokens: int, label: int, installed: int) -> Home:
        """``rollout`` came back with ``tokens`` tokens since it was sent.

        ``label``: the version that was installed when its computation began, by the engine's word; ``installed``: the
        one that is installed now. Raises ValueError if it had more tokens before.
        """
        by = self._cause.pop(rollout)
        self._left[by].discard(rollout)
        last = not self._left[by]
        if last:
            del self._left[by], self._engine[by]
        stood = self._stood.pop(rollout, None)
        if stood is None:
            return Home(by, last, [Span(label, tokens)], label)
        rest = tokens - stood.tokens
        if rest < 0:
            raise ValueError(f"rollout {rollout} had {stood.tokens} tokens in a pause, and came back with {tokens}")
        began = installed if stood.retracted else min(label, installed)
        return Home(by, last, [*stood.told, Span(installed, rest)], began if stood.kv is None else stood.kv)

    def lose(self, engine: int) -> list[int]:
        """``engine`` is gone; the rollouts that won't come back from it."""
        lost: list[int] = []
        for by in [by for by, e in self._engine.items() if e == engine]:
            del self._engine[by]
            lost += self._left.pop(by)
        for rollout in lost:
            del self._cause[rollout]
            self._stood.pop(rollout, None)
        return lost

    def stand(
        self, engine: int, live: dict[str, int], version: int, tell: Callable[[int, int, int, int], None]
    ) -> None:
        """``engine`` stands still under ``version``; ``live`` are the tokens of its requests since they were sent.

        ``tell`` is called for each that made some since it was told of last: with its command, rollout, their number
        and the version of the KV under them.
        """
        for rollout in self._on(engine):
            made = live.get(str(rollout))
            if made is None:
                continue
            stood = self._stood.setdefault(rollout, Stood())
            n = made - stood.tokens
            if n > 0:
                stood.kv = version if stood.kv is None else stood.kv
                stood.told = [*stood.told, Span(version, n)]
                tell(self._cause[rollout], rollout, n, stood.kv)

    def retract(self, engine: int) -> None:
        """The requests inside ``engine`` compute their KV anew."""
        for rollout in self._on(engine):
            stood = self._stood.setdefault(rollout, Stood())
            stood.kv, stood.retracted = None, True

    def moved(self, engine: int, live: dict[str, int]) -> str:
        """Which request of ``engine`` has other tokens by now than in the pause, in words; "" for none."""
        for rollout in self._on(engine):
            had = self._stood.get(rollout, Stood()).tokens
            if (has := live.get(str(rollout), had)) != had:
                return f"rollout {rollout} had {had} tokens in the pause and has {has}"
        return ""

    def _on(self, engine: int) -> list[int]:
        return sorted(r for by, e in self._engine.items() if e == engine for r in self._left[by])
