"""The manifest: the first line of a history. What was run, on what, and under which definitions."""

from typing import Any, Literal

from msgspec import Struct, field

from .naming import PolicySpec, spec
from .policy import Policy
from .shape import Device, Promises, Shape

SCHEMA = 1
"""Version of the history's schema. A reader refuses a newer one."""


class Definitions(Struct, frozen=True, forbid_unknown_fields=True):
    """What the words of the run mean."""

    state: str = "the prompt and the tokens so far"
    action: str = "the next token"
    termination: str = "the forced length of the rollout"
    reward: str = "none: the simulator scores nothing"


class Manifest(Struct, frozen=True, tag_field="ev", tag="manifest", forbid_unknown_fields=True):
    """Everything that a reader needs to check, replay and compare the run."""

    schema: int
    world: Literal["sim", "real"]
    policy: PolicySpec
    shape: Shape
    promises: Promises
    devices: list[Device]
    capacity: list[int]
    """Memory of each device in bytes; 0: not known, and so not checked."""
    seed: int
    version_bytes: int
    """Bytes of one version's weights."""
    workload: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    """Versions of rlsched, engine, framework, grader and benchmark."""
    definitions: Definitions = field(default_factory=Definitions)
    paced: bool = False
    """Engine steps and trainer phases were held to declared minima."""
    labels: dict[str, str] = field(default_factory=dict)
    """What was there: devices, transport, memory."""


def manifest(world: Literal["sim", "real"], policy: Policy, shape: Shape, seed: int, **facts: Any) -> Manifest:
    """The manifest of a run of ``policy``; ``facts`` are the other fields."""
    devices = policy.layout(shape)
    return Manifest(
        schema=SCHEMA,
        world=world,
        policy=spec(policy),
        shape=shape,
        promises=policy.promises(shape),
        devices=devices,
        capacity=facts.pop("capacity", [0] * len(devices)),
        seed=seed,
        version_bytes=facts.pop("version_bytes", 0),
        **facts,
    )
