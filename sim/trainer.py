"""The simulated trainer: phases of a batch, parts that come and go, and buckets of weights."""

from typing import Protocol

from rlsched.commands import Command, Load, Offload, Part, Train, Transfer
from rlsched.facts import AnyFact, Bucket, Done, Installed, Phase, Resident, Trained, Updating
from rlsched.shape import Device

from .clock import NANOSECOND, Clock, Process, ps
from .memory import trainer_bytes
from .scenario import GB, Scenario
from .server import Server


class Host(Protocol):
    """What a trainer needs of its world."""

    clock: Clock
    scenario: Scenario
    devices: list[Device]
    servers: dict[int, Server]

    def post(self, fact: AnyFact) -> None:
        """Record a fact and act on what follows."""

    def tokens(self, rollout: int) -> tuple[int, int]:
        """Prompt and output tokens of a rollout."""

    def trained(self, groups: list[int]) -> None:
        """Groups were trained on."""


class Trainer:
    """Runs one command at a time."""

    def __init__(self, world: Host) -> None:
        self._world = world
        self._u = 0
        self._latency = max(NANOSECOND, ps(world.scenario.control.latency_s))
        self._shards = sum(d.trainer for d in world.devices)

    def take(self, command: Command) -> None:
        """Begin ``command`` after the latency of control."""
        match command:
            case Train():
                self._world.clock.process(self._train(command))
            case Transfer():
                self._world.clock.process(self._transfer(command))
            case Load():
                self._world.clock.process(self._move(command.id, command.parts, 1))
            case Offload():
                self._world.clock.process(self._move(command.id, command.parts, 0))

    def _train(self, command: Train) -> Process:
        world, costs = self._world, self._world.scenario.trainer
        yield world.clock.wait(self._latency, "trainer")
        sizes = [world.tokens(r) for r in command.rollouts]
        new = sum(output for _, output in sizes)
        every = new + sum(prompt for prompt, _ in sizes)
        for name, seconds in phases(scenario=world.scenario, tokens=every, shards=self._shards):
            duration = ps(seconds)
            yield world.clock.wait(duration, "trainer")
            world.post(Phase(world.clock.stamp, command.id, name, duration // NANOSECOND))
        self._u += costs.optimizer_steps
        world.post(Trained(world.clock.stamp, command.id, self._u, new))
        world.trained(command.groups)
        world.post(Done(world.clock.stamp, command.id))

    def _transfer(self, command: Transfer) -> Process:
        """Bucket by bucket, to all engines at once."""
        world, costs = self._world, self._world.scenario.transport
        begun = {s: s.life for e in command.engines if (s := world.servers[e]).up}
        yield world.clock.wait(self._latency, "trainer")
        for s in _standing(begun):
            s.begin_update()
            world.post(Updating(world.clock.stamp, command.id, s.id, command.version))
        yield world.clock.wait(ps(costs.begin_s(command.transport)), "trainer")
        sizes = buckets(round(costs.version_gb * GB), command.bucket)
        for index, size in enumerate(sizes):
            duration = ps(costs.bucket_s(command.transport, size))
            yield world.clock.wait(duration, "trainer")
            for s in _standing(begun):
                world.post(Bucket(world.clock.stamp, command.id, s.id, index, size, duration // NANOSECOND))
        for s in _standing(begun):
            s.end_update(command.version)
            world.post(Installed(world.clock.stamp, command.id, s.id, command.version, sum(sizes)))
        world.post(Done(world.clock.stamp, command.id))

    def _move(self, by: int, parts: list[Part], times: int) -> Process:
        """Shards move in parallel, parts one after the other."""
        world = self._world
        yield world.clock.wait(self._latency, "trainer")
        for part in parts:
            size = trainer_bytes(world.scenario, part, world.devices)
            memory = world.scenario.memory
            yield world.clock.wait(ps(memory.shift_s + size / GB / memory.offload_gbps), "trainer")
            for d in world.devices:
                if d.trainer:
                    world.post(Resident(world.clock.stamp, by, d.id, "trainer", part, size * times))
        world.post(Done(world.clock.stamp, by))


def _standing(begun: dict[Server, int]) -> list[Server]:
    """The servers that have not crashed since they began to take the update in."""
    return [s for s, life in begun.items() if s.life == life]


def phases(scenario: Scenario, tokens: int, shards: int) -> list[tuple[str, float]]:
    """Phases of a batch of ``tokens`` tokens (prompts included) on ``shards`` devices, with their seconds."""
    costs = scenario.trainer
    scale = costs.reference_devices / shards if costs.reference_devices else 1.0
    found = [
        ("old_logprob", costs.old_logprob_s + costs.old_logprob_token_s * tokens),
        ("ref", costs.ref_s + costs.ref_token_s * tokens),
        ("update", costs.update_s * costs.optimizer_steps + costs.update_token_s * tokens),
    ]
    return [(name, seconds * scale) for name, seconds in found if seconds > 0 or name == "update"]


def buckets(total: int, most: int) -> list[int]:
    """Sizes of the buckets that carry ``total`` bytes, each at most ``most``."""
    whole, rest = divmod(total, most)
    return [most] * whole + ([rest] if rest else [])
