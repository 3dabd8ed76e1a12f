"""Which rollouts are inside which engine, and by which command."""

from rlsched.commands import Generate


class Requests:
    """The requests of a run that have not come back."""

    def __init__(self) -> None:
        self._cause: dict[int, int] = {}
        self._left: dict[int, set[int]] = {}
        self._engine: dict[int, int] = {}

    def __contains__(self, rollout: int) -> bool:
        return rollout in self._cause

    def send(self, command: Generate) -> None:
        """The rollouts of ``command`` go to its engine."""
        self._engine[command.id] = command.engine
        self._left[command.id] = {work.rollout for work in command.work}
        self._cause.update((work.rollout, command.id) for work in command.work)

    def back(self, rollout: int) -> tuple[int, bool]:
        """``rollout`` came back; the command that had sent it, and whether none of that command's is left."""
        by = self._cause.pop(rollout)
        self._left[by].discard(rollout)
        if self._left[by]:
            return by, False
        del self._left[by], self._engine[by]
        return by, True

    def lose(self, engine: int) -> list[int]:
        """``engine`` is gone; the rollouts that won't come back from it."""
        lost: list[int] = []
        for by in [by for by, e in self._engine.items() if e == engine]:
            del self._engine[by]
            lost += self._left.pop(by)
        for rollout in lost:
            del self._cause[rollout]
        return lost
