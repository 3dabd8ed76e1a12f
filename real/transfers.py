"""Transfers: a version on its way from the trainer to engines, as facts."""

from collections.abc import Callable

from rlsched.commands import Transfer
from rlsched.errors import WorldError
from rlsched.facts import AnyFact, Bucket, Done, Installed, Updating

from .rig import Rig
from .transport import Buckets


class Transfers:
    """Carries transfers out on the children of ``rig``, and knows what is installed.

    ``moved`` is asked for each engine that ended an update, with the tokens that its live requests have by its answer:
    it says which of them was stepped amid the update, "" for none.
    """

    def __init__(
        self,
        rig: Rig,
        post: Callable[[AnyFact], None],
        now: Callable[[], int],
        down: set[int],
        moved: Callable[[int, dict[str, int]], str],
    ) -> None:
        self.installed = dict.fromkeys(rig.engines, 0)
        """The version that each engine held whole last."""
        self._rig = rig
        self._post = post
        self._now = now
        self._down = down
        self._moved = moved
        self.orphaned = False
        """The trainer is gone: its end has answered every transfer, and nothing more is told of them."""

    def _tell(self, fact: AnyFact) -> None:
        if not self.orphaned:
            self._post(fact)

    async def carry(self, command: Transfer) -> None:
        """Bring a version to those that live; when one dies amid a broadcast the others' is torn, and repeated.

        Raises WorldError if an engine made tokens meanwhile.
        """
        failed = dict.fromkeys(command.engines, "")
        while targets := [e for e in failed if e not in self._down]:
            lost = len(self._down)
            failed = await self._push(command, targets)
            if len(self._down) == lost:
                break
        why = "; ".join(f"engine {e}: {error}" for e, error in failed.items() if e not in self._down)
        self._tell(Done(self._now(), command.id, not why, why))

    async def _push(self, command: Transfer, engines: list[int]) -> dict[int, str]:
        """Bring a version to ``engines``; what failed there."""
        buckets: Buckets = self._rig.transport(command.transport, command.bucket)
        targets = {self._rig.engines[e].name: e for e in engines}

        def arrived(name: str, index: int, size: int, ns: int) -> None:
            if targets[name] not in self._down:
                self._tell(Bucket(self._now(), command.id, targets[name], index, size, ns))

        for e in engines:
            self._tell(Updating(self._now(), command.id, e, command.version))
        clients = [self._rig.engines[e] for e in engines]
        pushed = await buckets.push(self._rig.trainer, clients, command.version, on_bucket=arrived)
        for name, e in targets.items():
            if e in self._down:
                continue
            update = pushed.updated.get(name)
            if update is None:
                self._tell(Installed(self._now(), command.id, e, command.version, 0, ok=False))
                continue
            if moved := self._moved(e, update.live):
                raise WorldError(f"{name} made tokens amid an update: {moved}")
            self.installed[e] = command.version
            self._tell(Installed(self._now(), command.id, e, command.version, update.bytes))
        return {targets[name]: str(error) or type(error).__name__ for name, error in pushed.failed.items()}
