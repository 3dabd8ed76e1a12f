"""The shape of a run: its fixed numbers, shared by policy, controller, worlds and checker."""

from typing import Literal

from msgspec import Struct

from .errors import InputError

Fate = Literal["drain", "resume", "restart", "retract", "keep"]
"""What becomes of running requests at an update; see ``decisions.Install``."""


class Shape(Struct, frozen=True, forbid_unknown_fields=True):
    """The fixed numbers of a run. A version consumes ``k`` batches of ``b`` groups: B = k·b.

    Frameworks name them differently: B is verl's ``train_batch_size`` (in prompts) and AReaL's
    ``consumer_batch_size``; ``samples`` is verl's ``rollout.n`` and AReaL's ``n_samples``.
    """

    b: int = 8
    """Groups per batch, that is per call of the trainer."""
    k: int = 1
    """Batches per published version."""
    samples: int = 4
    """Samples that make a group whole."""
    steps: int = 10
    """Versions to publish before the run ends."""
    engines: int = 1
    """Rollout engines, unless the place slot says otherwise."""
    budget: int = 256
    """Most new tokens of a rollout, over all of its segments."""
    prompts: int | None = None
    """Prompts in the queue; None: it never runs dry."""

    @property
    def B(self) -> int:  # noqa: N802 - the field's own symbol
        """Groups per version."""
        return self.b * self.k

    def __post_init__(self) -> None:
        for name in ("b", "k", "samples", "steps", "engines", "budget"):
            if getattr(self, name) < 1:
                raise InputError(f"shape.{name} is {getattr(self, name)}: it must be at least 1")
        if self.prompts is not None and self.prompts < self.B:
            raise InputError(
                f"shape.prompts is {self.prompts}: one version needs {self.B} groups; raise it or leave it out"
            )


class Device(Struct, frozen=True, forbid_unknown_fields=True):
    """One device of the run: a GPU, or a set of CPU cores."""

    id: int
    engine: int | None
    trainer: bool
    holder: Literal["engine", "trainer"]
    """Who has it when the run begins."""
    parts: list[Literal["parameters", "optimizer"]] = []
    """Trainer parts that are on it when the run begins."""


class Promises(Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """What a policy promises about its histories: the checker holds it to this and to no more."""

    eta: int | None = None
    """Versions that admission may run ahead (CAP)."""
    concurrency: int | None = None
    """Most groups running at once (CAP)."""
    on_policy: bool = False
    """Every trained token comes from the version that it updates (SYNC)."""
    quiet: bool = False
    """No training rollout is live between train_start and publish (SYNC)."""
    in_order: bool = False
    """Batches take the lowest ordinals among the groups that aren't terminal (ORDER)."""
    age: int | None = None
    """Largest age of a trained group, in versions (AGE)."""
    partial: Fate | None = None
    """Fate of running requests at an update. Under restart and drain a rollout has one version, under the others its
    tokens are kept, and only under retract and keep a request lives through an install (PARTIAL)."""
    skew: int = 0
    """Versions by which a serving engine may lag behind the published one (PUBLISH)."""
    flush: bool = False
    """No token stands on KV of another version (LABEL); under keep, no request on KV older than itself."""


def merge(promises: list[Promises]) -> Promises:
    """All that the slots promise together. Of two bounds the tighter one counts."""
    eta = [p.eta for p in promises if p.eta is not None]
    concurrency = [p.concurrency for p in promises if p.concurrency is not None]
    age = [p.age for p in promises if p.age is not None]
    partial = [p.partial for p in promises if p.partial is not None]
    return Promises(
        eta=min(eta, default=None),
        concurrency=min(concurrency, default=None),
        on_policy=any(p.on_policy for p in promises),
        quiet=any(p.quiet for p in promises),
        in_order=any(p.in_order for p in promises),
        age=min(age, default=None),
        partial=partial[0] if partial else None,
        skew=max(p.skew for p in promises),
        flush=any(p.flush for p in promises),
    )
