"""The controller: a deterministic state machine from facts to commands and notes.

No I/O, no thread, no clock of its own; it can't tell a simulated world from a real one. After each
fact it runs to a fixpoint in one fixed order, because two orders are two schedulers:

    tracks → expire → stop → publish → select → resume → place → admit → route
"""

from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import Struct, ValidationError, convert, to_builtins

from .books import Out, admit, expire, fold, go, issue, next_id, refresh, stop, wait
from .commands import Command, Generate, Timer, Work
from .decisions import Batch, Hold, Install, Move, Start, Verdict, Wait
from .errors import PolicyError
from .facts import AnyFact, Done
from .ledger import Engine, Ledger
from .notes import Note
from .policy import Policy
from .shape import Shape
from .slot import Slot, Trigger
from .stages import Track
from .tracks import advance, announce, closing, installing, switching, training


class Controller:
    """Runs ``policy`` over a ledger. ``handle`` is the whole interface."""

    def __init__(self, policy: Policy, shape: Shape, seed: int = 0) -> None:
        self.policy = policy
        devices = policy.layout(shape)
        engines = {d.engine: Engine(d.engine) for d in devices if d.engine is not None}
        self.ledger = Ledger(shape, seed, devices, engines)
        refresh(self.ledger)
        self.ledger.holders = {d.id: d.holder for d in devices}
        for name, slot in policy.slots():
            self.ledger.states[name] = self._ask(name, slot.start, shape, seed)
        self._stateful = [n for n, s in policy.slots() if type(s).observe is not Slot.observe]
        self._heedful = any(getattr(s, "heeds_progress", True) for _, s in policy.slots())
        self._out: Out = []

    def handle(self, fact: AnyFact) -> list[Command | Note]:
        """Take one fact in; what follows from it, in order."""
        self._out = []
        out = self._out
        if self.ledger.stopped:
            return out
        heard = fold(self.ledger, fact, out)
        if heard == "ignored":
            return out
        states = self.ledger.states
        for name in self._stateful:
            observe = getattr(self.policy, name).observe
            states[name] = self._ask(name, observe, states[name], fact, self.ledger)
        if isinstance(fact, Done) and not fact.ok:
            stop(self.ledger, fact.why or f"command {fact.cmd} failed", out)
        quiet = heard == "progress" and not self._heedful and not self._draining()
        if self.ledger.begun and not self.ledger.stopped and not quiet:
            while self._settle():
                pass
        return out

    def checkpoint(self) -> bytes:
        """Everything that the next answers depend on, but for the policy."""
        return msgspec.json.encode(self.ledger)

    def restore(self, checkpoint: bytes) -> None:
        """Go on from a checkpoint of a controller with the same policy and shape."""
        fresh = self.ledger.states
        self.ledger = msgspec.json.decode(checkpoint, type=Ledger)
        for name, state in self.ledger.states.items():
            self.ledger.states[name] = msgspec.convert(state, type(fresh[name]))

    def _draining(self) -> bool:
        """Some track has its answers and waits for rollouts to come back."""
        return any(not track.awaiting for track in self.ledger.tracks.values())

    def _settle(self) -> bool:
        """One pass in the fixed order; whether anything changed."""
        moved = False
        for step in (
            self._tracks,
            self._expire,
            self._stop,
            self._publish,
            self._select,
            self._resume,
            self._place,
            self._admit,
            self._route,
        ):
            moved |= step()
        return moved

    def _tracks(self) -> bool:
        ledger = self.ledger
        moved = sum(advance(ledger, name, self._out) for name in list(ledger.tracks)) > 0
        if ledger.v < ledger.x and ledger.update is None and not ledger.tracks and not ledger.behind():
            # The last engine that was behind went down between two installs.
            announce(ledger, None, self._out)
            moved |= ledger.v == ledger.x
        return moved

    def _expire(self) -> bool:
        """Ask once for each change of the version being consumed or published, and of the buffer."""
        ledger = self.ledger
        triggers: tuple[Trigger, ...] = ("train", "publish") if ledger.trainer_free else ("publish",)
        moved = False
        for trigger in triggers:
            kept = ledger.counters.accepted + ledger.counters.dropped
            seen = (ledger.x, ledger.index, kept) if trigger == "train" else (ledger.v, 0, 0)
            if ledger.expired.get(trigger) == seen:
                continue
            ledger.expired[trigger] = seen
            for verdict in self._call("expire", (list, tuple), trigger):
                self._check("expire", isinstance(verdict, Verdict), f"{verdict!r} is no Verdict")
                known = ledger.groups.get(verdict.group)
                if known is None or known.state not in ("running", "accepted"):
                    raise self._error("expire", f"group {verdict.group} is neither running nor accepted")
                if verdict.fate == "park" and (known.state != "running" or known.parked == ledger.v):
                    continue
                expire(ledger, verdict, self._out)
                moved = True
        return moved

    def _stop(self) -> bool:
        """Begin to close once the last version is out."""
        ledger = self.ledger
        if ledger.v < ledger.shape.steps:
            return False
        if not ledger.closing:
            ledger.closing = True
            for g in [*ledger.running, *ledger.buffer]:
                expire(ledger, Verdict(g, "drop", "the run ends"), self._out)
        if ledger.tracks:
            return False
        ledger.tracks["closing"] = Track(closing(ledger))
        return True

    def _publish(self) -> bool:
        ledger = self.ledger
        if ledger.update is not None or ledger.tracks or ledger.closing:
            return False  # a batch that waits for its devices is no hindrance: engines may have to finish its version
        update = self._call("publish", (Install, type(None)))
        if update is None:
            return False
        self._check("publish", update.version == ledger.x, f"version {update.version} is not the trained one")
        behind = {*ledger.behind()}
        self._check("publish", bool(behind & {*update.engines}), f"engines {update.engines} hold that version already")
        self._check("publish", {*update.engines} <= {*ledger.serving()}, f"of engines {update.engines} some are down")
        self._check("publish", len({*update.engines}) == len(update.engines), "an engine is named twice")
        self._check("publish", update.bucket >= 1, f"buckets of {update.bucket} bytes")
        within = update.fate in ("retract", "keep")
        self._check("publish", update.flush or update.fate != "retract", "fate retract flushes, and flush is False")
        more = [e for e in update.engines if e not in behind] if within else []
        self._check("publish", not more, f"fate {update.fate} on engines {more}, which hold that version already")
        ledger.update = update
        return True

    def _select(self) -> bool:
        ledger = self.ledger
        if not ledger.trainer_free or ledger.closing or ledger.x > ledger.v:
            return False  # a version is published before the next is begun
        choice = self._call("select", (Batch, Wait))
        if isinstance(choice, Wait):
            wait(ledger, "trainer", choice.why, self._out)
            if choice.until is not None and choice.until > ledger.now and not self._timer(choice.until):
                issue(ledger, Timer(next_id(ledger), choice.until), self._out)
            return False
        unknown = [g for g in choice.groups if g not in ledger.buffer]
        self._check("select", bool(choice.groups) and not unknown, f"groups {unknown} are not in the buffer")
        self._check("select", len({*choice.groups}) == len(choice.groups), "a group is named twice")
        self._check("select", choice.index == ledger.index, f"index {choice.index} is not {ledger.index}")
        go(ledger, "trainer", self._out)
        ledger.batch = choice
        return True

    def _timer(self, at: int) -> bool:
        return any(isinstance(c, Timer) and c.at == at for c in self.ledger.open.values())

    def _resume(self) -> bool:
        """Interrupted rollouts go to the head of the line as soon as an engine takes requests."""
        ledger = self.ledger
        if not ledger.interrupted or ledger.closing or not ledger.ready:
            return False
        parked = [r for r in ledger.interrupted if ledger.groups[ledger.rollouts[r].group].parked == ledger.v]
        back = {*ledger.interrupted} - {*parked}
        for r in back:
            ledger.rollouts[r].state = "waiting"
        ledger.waiting[:0] = sorted(back)
        ledger.interrupted[:] = parked
        return bool(back)

    def _place(self) -> bool:
        """Start the track that a batch or an update needs once its devices are granted, or else move devices."""
        ledger = self.ledger
        if ledger.tracks:
            return False
        known = {d.id: d for d in ledger.devices}
        moves: list[Move] = []
        for m in self._call("place", (list, tuple)):
            self._check("place", isinstance(m, Move) and m.device in known, f"{m!r} names no device")
            if ledger.holders[m.device] != m.holder:
                moves.append(m)
        taking = [m for m in moves if m.holder == "trainer"]
        giving = [m for m in moves if m.holder == "engine"]
        if ledger.update is not None:
            homes = {d.id for d in known.values() if d.engine in ledger.update.engines}
            away = {d for d in homes if ledger.holders[d] == "trainer"}
            giving = [m for m in giving if m.device in away]
            if away != {m.device for m in giving}:
                return False
            ledger.tracks["weights"] = Track(installing(ledger.update, giving, ledger))
        elif ledger.batch is not None:
            lacking = {d.id for d in known.values() if d.trainer and ledger.holders[d.id] != "trainer"}
            if lacking != {m.device for m in taking}:
                return False
            ledger.tracks["trainer"] = Track(training(taking, ledger))
        elif moves and not ledger.closing:
            ledger.tracks["switch"] = Track(switching(taking or giving, ledger))
        else:
            return False
        return True

    def _admit(self) -> bool:
        ledger = self.ledger
        if ledger.closing:
            return False
        starts: list[Start] = list(self._call("admit", (list, tuple)))
        for start in starts:
            self._check("admit", isinstance(start, Start), f"{start!r} is no Start")
            self._check("admit", 1 <= start.need_n <= start.launch_n, f"{start!r}: 1 ≤ need_n ≤ launch_n")
            queued = any(p.id == start.prompt for p in ledger.again.get(start.queue, ()))
            fresh = (
                ledger.cursor <= start.prompt < (ledger.shape.prompts or 1 << 62) and start.prompt not in ledger.taken
            )
            self._check("admit", queued or fresh, f"prompt {start.prompt} is not waiting")
            admit(ledger, start, self._out)
        return bool(starts)

    def _route(self) -> bool:
        ledger = self.ledger
        if ledger.closing or not ledger.waiting or not ledger.ready:
            return False
        held: list[int] = []
        batches: dict[tuple[int, int], list[Work]] = {}
        for r in ledger.waiting:
            rollout = ledger.rollouts[r]
            engine = self._call("route", (int, Hold), rollout, rollout.cause)
            if isinstance(engine, Hold):
                held.append(r)
                continue
            target = ledger.engines.get(engine)
            if target is None or not target.takes_requests:
                raise self._error("route", f"engine {engine} does not take requests")
            group = ledger.groups[rollout.group]
            rollout.state, rollout.engine = "live", engine
            rollout.sent, rollout.told = rollout.tokens, -1
            target.live.add(r)
            group.begun = ledger.now if group.begun < 0 else group.begun
            work = Work(r, group.prompt, rollout.sample, group.attempt, rollout.tokens)
            batches.setdefault((engine, group.id), []).append(work)
        sent = len(ledger.waiting) - len(held)
        ledger.waiting[:] = held
        ledger.counters.dispatched += sent
        for (engine, _), works in batches.items():
            command = Generate(next_id(ledger), engine, works)
            for work in works:
                ledger.rollouts[work.rollout].by = command.id
            ledger.pending[command.id] = len(works)
            issue(ledger, command, self._out)
        return sent > 0

    def _call(self, name: str, kind: type | tuple[type, ...], *args: Any) -> Any:
        """Ask slot ``name`` to decide, and see to it that it answers with a ``kind``."""
        slot = getattr(self.policy, name)
        answer = self._ask(name, slot.decide, self.ledger.states[name], self.ledger, *args)
        self._check(name, isinstance(answer, kind), f"decide returned {answer!r}")
        for part in answer if isinstance(answer, list | tuple) else (answer,):
            if isinstance(part, Struct):
                self._sound(name, part)
        return answer

    def _sound(self, name: str, part: Struct) -> None:
        """See to it that the fields of a decision have their types, which msgspec doesn't when it builds one."""
        try:
            convert(to_builtins(part), type(part))
        except (ValidationError, TypeError) as error:
            raise self._error(name, f"{part!r}: {error}") from None

    def _ask(self, name: str, question: Callable[..., Any], *args: Any) -> Any:
        return self.policy.ask(name, question, *args)

    def _check(self, name: str, good: bool, what: str) -> None:
        if not good:
            raise self._error(name, what)

    def _error(self, name: str, what: str) -> PolicyError:
        return self.policy.error(name, what)
