"""Labels: what a run's state is called, in the words of the document that the presets follow.

Six labels describe a state. Versions are relative to a cycle, which begins under ``v`` and produces
``v+1``. Devices and transports have the names of what was there (``Manifest.labels``), and no label
says more than the history shows.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from .manifest import Manifest
from .scene import Engine, Scene

Kind = Literal["dispatch", "accept", "sleep", "train", "pause", "update", "wake", "resume"]
"""A milestone of a cycle."""


class Labels(Struct, frozen=True):
    """The six labels of a state."""

    placement: str
    engine: str
    trainer: str
    version: str
    transport: str
    staleness: str


HEADINGS = {
    "placement": "Placement",
    "engine": "Engine {memory}",
    "trainer": "Trainer",
    "version": "Policy version",
    "transport": "Weight transport",
    "staleness": "Staleness rule",
}
"""Heading of each label."""

DEVICES = {
    "GPU": {
        "plural": "GPUs",
        "memory": "GPU memory",
        "same": "same GPUs (HYBRID)",
        "resident": "on GPU",
        "gone": "offloaded to CPU",
    },
    "one GPU, shared": {
        "plural": "processes on one GPU, shared",
        "memory": "GPU memory",
        "same": "same GPU",
        "resident": "on GPU",
        "gone": "offloaded to CPU",
    },
    "GPUs, shared": {
        "plural": "processes on shared GPUs",
        "memory": "GPU memory",
        "same": "same GPUs (HYBRID)",
        "resident": "on GPU",
        "gone": "offloaded to CPU",
    },
    "cores": {
        "plural": "cores",
        "memory": "memory",
        "same": "same cores",
        "resident": "in host memory",
        "gone": "not in memory",
    },
    "": {
        "plural": "devices",
        "memory": "memory",
        "same": "same devices",
        "resident": "on its devices",
        "gone": "offloaded",
    },
}
"""What devices are called, by the manifest's label ``device``: several of them, their memory, a placement
in which engines and trainer take turns, and trainer parts that are there or, all of them, not."""

TRANSPORTS = {"ipc": "{} buckets", "broadcast": "{} broadcast buckets", "disk": "checkpoint on disk"}
"""By a transfer's transport; the manifest's label of that name fills it."""

TITLES = {
    "dispatch": "Generate rollouts",
    "dispatch, capped": "Admit rollouts under the cap",
    "accept": "Wait for the full batch",
    "accept, capped": "Collect accepted trajectories",
    "sleep": "Sleep the engine",
    "train": "Train the policy",
    "train, live": "Train while engines generate",
    "pause": "Pause",
    "pause, interrupted": "Pause and interrupt",
    "pause, kept": "Pause with requests inside",
    "update": "Send new weights",
    "update, ipc": "Copy weights through {ipc}",
    "update, broadcast": "Broadcast new weights",
    "update, disk": "Load new weights from disk",
    "wake": "Hand the {plural} back",
    "resume": "Resume generation",
    "resume, resumed": "Resume interrupted requests",
    "resume, restarted": "Restart interrupted requests",
    "resume, kept": "Resume kept requests",
    "resume, retracted": "Resume retracted requests",
}
"""Title of a step, by its milestone and what was so."""


class Course(Struct):
    """What has happened in the cycle that produces ``version``."""

    version: int
    interrupted: bool = False
    """The update made rollouts come back unfinished."""
    resent: Literal["", "resumed", "restarted"] = ""
    """How rollouts that had come back were sent again."""
    within: Literal["", "kept", "retracted"] = ""
    """How requests with tokens lived through the update, once it paused them: with their KV, or without."""
    transport: str = ""
    """Of the update, once it began."""
    mixed: tuple[int, int] | None = None
    """Of a rollout that went on under another version: that of its newest tokens, and the other one."""

    def name(self, version: int) -> str:
        """``version`` relative to this cycle."""
        ahead = version - self.version + 1
        return f"v{ahead:+d}" if ahead else "v"


class Labeller:
    """Labels and titles of one run."""

    def __init__(self, manifest: Manifest) -> None:
        self._given = manifest.labels
        self._words = _words(manifest)
        self._trainers = [d.id for d in manifest.devices if d.trainer]
        self._colocated = all(d.engine is not None for d in manifest.devices if d.trainer)
        turns = {d.trainer for d in manifest.devices if d.engine is not None}
        separate, some = "separate {plural}".format(**self._words), "some {plural} shared".format(**self._words)
        self._placement = some if len(turns) > 1 else self._words["same"] if True in turns else separate
        self._rule, self._capped = rule(manifest)

    def labels(self, scene: Scene, course: Course) -> Labels:
        """The labels of ``scene``, as seen from ``course``."""
        engines = [self._engine(e, scene, course, id in scene.live.values()) for id, e in scene.engines.items()]
        transport = TRANSPORTS.get(course.transport, "{}")
        mixed = "one trajectory can mix {} and {}"
        return Labels(
            placement=self._placement,
            engine=_joined(engines),
            trainer=self._trainer(scene, course),
            version=_version(scene, course),
            transport=transport.format(self._given.get(course.transport, course.transport)) or "none",
            staleness=mixed.format(*map(course.name, course.mixed)) if course.mixed else self._rule,
        )

    def title(self, kind: Kind, scene: Scene, course: Course) -> str:
        """The title of the step that ``kind`` begins."""
        capped = "capped" if self._capped else ""
        detail = {
            "dispatch": capped,
            "accept": capped,
            "train": "live" if scene.live else "",
            "pause": "interrupted" if course.interrupted else "kept" if course.within else "",
            "update": course.transport,
            "resume": course.resent or course.within,
        }.get(kind)
        title = TITLES.get(f"{kind}, {detail}", TITLES[kind])
        return title.format(ipc=self._given.get("ipc", "ipc"), **self._words)

    def _engine(self, engine: Engine, scene: Scene, course: Course, running: bool) -> str:
        new = engine.version == course.version
        if engine.asleep == {"kv"}:
            return "weights only"
        if engine.asleep:
            return self._asleep(engine, scene)
        if engine.version < 0:
            return "no version whole"
        if engine.paused and not new:
            stopped = "running requests aborted" if course.interrupted else "no running requests"
            return "paused, running requests kept" if running else f"paused, {stopped}"
        memory = "weights and KV cache"
        if engine.fresh == course.version:
            memory = "weights and fresh KV cache"
        elif new:
            memory = f"weights {course.name(engine.version)}"
        if engine.paused and running:
            return f"{memory}, running requests kept"
        if engine.paused and course.interrupted:
            return f"{memory}, no running requests"
        went_on = course.resent or course.within
        return f"{memory}, requests {went_on}" if new and went_on else memory

    def _asleep(self, engine: Engine, scene: Scene) -> str:
        """A sleep released what is known to be gone, and no more."""
        frees = self._given.get("sleep_frees")
        gone = []
        for part in sorted(engine.asleep, reverse=True):
            said = frees is not None and part in frees.split(", ")
            told = (engine.device, part) not in scene.resident if "engine" in scene.reporting else said
            if told and (said or frees is None):
                gone.append({"weights": "weights", "kv": "KV cache"}[part])
        if not gone:
            known = frees is not None and "engine" in scene.reporting
            return f"asleep at level {engine.level}" + (", nothing released" if known else "")
        released = f"released by level-{engine.level} sleep"
        return released if len(gone) == 2 else f"{gone[0]} {released}"

    def _trainer(self, scene: Scene, course: Course) -> str:
        if self._colocated:
            parts = [p for p in ("parameters", "optimizer") if any((d, p) in scene.resident for d in self._trainers)]
            return f"{' and '.join(parts)} {self._words['resident']}" if parts else self._words["gone"]
        if scene.training:
            return f"computes {course.name(scene.training)}"
        if all(e.version != scene.x for e in scene.engines.values()):
            return f"finished {course.name(scene.x)}"
        return f"on its own {self._words['plural']}"


def headings(manifest: Manifest) -> list[str]:
    """Heading of each label, in the order of ``Labels``."""
    return [HEADINGS[label].format(**_words(manifest)) for label in Labels.__struct_fields__]


def rule(manifest: Manifest) -> tuple[str, bool]:
    """The staleness label of a run's admission and expiry, and whether a cap is the rule.

    An admit slot with a field ``eta`` is a cap; of others, what they promise is the rule.
    """
    promises = manifest.promises
    eta, capped = promises.eta, "eta" in manifest.policy.slots["admit"].fields
    if promises.on_policy and not capped:
        return "on-policy by construction", False
    if eta is None:
        return "no rule" if promises.age is None else f"age ≤ {promises.age}", False
    cap = "admission cap, η = 0 by default" if eta == 0 else f"admission cap, η = {eta}"
    return cap if promises.age is None else f"{cap}, age ≤ {promises.age}", True


def _words(manifest: Manifest) -> dict[str, str]:
    return DEVICES.get(manifest.labels.get("device", ""), DEVICES[""])


def _version(scene: Scene, course: Course) -> str:
    """Who has which version. A policy that no engine holds, for it sleeps, is still the trainer's."""
    held = sorted({e.version for e in scene.engines.values()} - {-1})
    newest = scene.training or scene.x
    if held in ([], [newest]):
        return f"trainer computes {course.name(newest)}" if scene.training else course.name(newest)
    return f"engines {' and '.join(map(course.name, held))}, trainer {course.name(newest)}"


def _joined(labels: Iterable[str]) -> str:
    """One label for all engines; counts where they differ."""
    counts = Counter(labels)
    if len(counts) < 2:
        return next(iter(counts), "no engine is up")
    return "; ".join(f"{n} of {counts.total()} {label}" for label, n in counts.most_common())
