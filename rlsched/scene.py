"""The scene: what is so at a point of a history, by what its facts say and nothing else.

A command counts once it is answered, so that no one is asleep who has only been told to be.
"""

from msgspec import Struct

from .commands import Command, Generate, Load, Offload, Pause, Resume, Sleep, Train, Transfer, Wake
from .facts import Done, Down, Installed, Resident, Segment, Up, Updating
from .history import Event
from .manifest import Manifest


class Engine(Struct):
    """An engine that is up."""

    device: int
    version: int = -1
    """The version that it holds whole, on its device or on the host; -1: none."""
    asleep: set[str] = set()
    """What a sleep took and no wake has given back: ``weights``, ``kv``."""
    level: int = 0
    """Of its last sleep."""
    fresh: int = 0
    """Versions trained when it last got a new KV cache; 0: it never did."""
    paused: bool = False


class Scene:
    """Folds events: ``feed`` each, and look."""

    def __init__(self, manifest: Manifest) -> None:
        self._homes = {d.engine: d.id for d in manifest.devices if d.engine is not None}
        self._trainers = [d.id for d in manifest.devices if d.trainer]
        self.engines = {e: Engine(device) for e, device in self._homes.items()}
        self.resident: set[tuple[int, str]] = {(d.id, part) for d in manifest.devices for part in d.parts}
        """Device and part of what is known to be there."""
        self.reporting: set[str] = set()
        """Of ``engine`` and ``trainer``, who says what is resident."""
        self.live: dict[int, int] = {}
        """Engine of each live rollout."""
        self.open: dict[int, Command] = {}
        """Commands without an answer."""
        self.x = 0
        """Versions trained."""
        self.training = 0
        """The version in the making; 0: none."""

    def feed(self, event: Event) -> Command | None:
        """Take the next event in; the command that it answers well, if it answers one."""
        match event:
            case Command():
                self.open[event.id] = event
                if isinstance(event, Generate):
                    self.live |= {work.rollout: event.engine for work in event.work}
                elif isinstance(event, Train):
                    self.training = event.version
            case Segment() if event.end != "install":
                self.live.pop(event.rollout, None)
            case Updating() | Installed() if event.engine in self.engines:
                whole = isinstance(event, Installed) and event.ok
                self.engines[event.engine].version = event.version if whole else -1
            case Resident():
                self.reporting.add(event.owner)
                place = self.resident.add if event.bytes else self.resident.discard
                place((event.device, event.part))
            case Done():
                command = self.open.pop(event.cmd, None)
                if command is not None and event.ok:
                    self._answered(command)
                    return command
            case Down():
                self._down(event.engine)
            case Up():
                self.engines[event.engine] = Engine(self._homes[event.engine])
            case _:
                pass
        return None

    def _answered(self, command: Command) -> None:
        engine = self.engines.get(getattr(command, "engine", -1))
        match command:
            case Sleep() if engine is not None:
                engine.asleep, engine.level = {"weights", "kv"}, command.level
                if command.level == 2:
                    engine.version = -1
            case Wake() if engine is not None:
                engine.asleep = engine.asleep - {*command.tags}
                engine.fresh = self.x if "kv" in command.tags else engine.fresh
            case Pause() | Resume() if engine is not None:
                engine.paused = isinstance(command, Pause)
            case Train() if command.last:
                self.x, self.training = command.version, 0
            case Load() | Offload() if "trainer" not in self.reporting:
                moved = {(d, part) for d in self._trainers for part in command.parts}
                self.resident = self.resident | moved if isinstance(command, Load) else self.resident - moved
            case _:
                pass

    def _down(self, engine: int | None) -> None:
        """An engine or the trainer is gone, and its commands with it."""
        if engine is None:
            self.training = 0
            self.open = {i: c for i, c in self.open.items() if not isinstance(c, Load | Offload | Train | Transfer)}
        else:
            self.engines.pop(engine, None)
            self.open = {i: c for i, c in self.open.items() if getattr(c, "engine", -1) != engine}
            self.live = {r: e for r, e in self.live.items() if e != engine}
