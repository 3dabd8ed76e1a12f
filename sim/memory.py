"""Memory: what each owner holds on a device, in bytes."""

from rlsched.commands import Part, Tag
from rlsched.facts import Resident
from rlsched.shape import Device

from .scenario import GB, Scenario


def engine_bytes(scenario: Scenario, part: Tag) -> int:
    """Bytes of one engine's weights or KV cache on its device."""
    return round((scenario.transport.version_gb if part == "weights" else scenario.memory.kv_gb) * GB)


def trainer_bytes(scenario: Scenario, part: Part, devices: list[Device]) -> int:
    """Bytes of one trainer part on each of the trainer's devices: it is sharded over all of them."""
    shards = sum(d.trainer for d in devices)
    whole = scenario.trainer.parameters_gb if part == "parameters" else scenario.trainer.optimizer_gb
    return round(whole * GB / shards)


def at_setup(scenario: Scenario, devices: list[Device]) -> list[Resident]:
    """What is where when the run begins."""
    found: list[Resident] = []
    for d in devices:
        if d.engine is not None:
            parts: tuple[Tag, ...] = ("weights", "kv")
            found += [Resident(0, 0, d.id, "engine", p, engine_bytes(scenario, p)) for p in parts]
        if d.trainer:
            both: tuple[Part, ...] = ("parameters", "optimizer")
            found += [
                Resident(0, 0, d.id, "trainer", p, trainer_bytes(scenario, p, devices) if p in d.parts else 0)
                for p in both
            ]
    return found
