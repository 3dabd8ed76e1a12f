"""One real run: from a policy on a rig to a history."""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec

from rlsched.controller import Controller
from rlsched.facts import End
from rlsched.history import Line, Writer
from rlsched.manifest import Definitions, Manifest, manifest
from rlsched.policy import Policy

from .devices import labels
from .rig import Rig
from .rollouts import RolloutLog
from .setup import Setup
from .task import GRADER
from .world import Look, World


def engines(policy: Policy, setup: Setup) -> int:
    """How many engines ``policy`` lays out."""
    return sum(d.engine is not None for d in policy.place.layout(setup.shape))


def describe(rig: Rig, policy: Policy, seed: int) -> Manifest:
    """The manifest of a run of ``policy`` on ``rig``."""
    setup = rig.setup
    first = rig.engines[0]
    termination = "the forced length of the rollout" if setup.forced else "end-of-sequence, or the budget"
    return manifest(
        "real",
        policy,
        setup.shape,
        seed,
        version_bytes=first.parameter_bytes,
        workload=msgspec.to_builtins(setup.workload),
        model=msgspec.to_builtins(setup.engine.model),
        versions={
            "rlsched": version("rlsched"),
            first.capabilities.engine: first.capabilities.version,
            "torch": version("torch"),
            "grader": GRADER,
            "benchmark": f"cyclic-repeat, {setup.task.held_out} of the prompts held out",
        },
        definitions=Definitions(
            state="BOS, three symbols, and the tokens so far",
            action="the next token",
            termination=termination,
            reward="share of positions that repeat the three symbols in turn",
        ),
        paced=setup.engine.pace is not None,
        labels={
            "trainer": rig.trainer.label,
            **labels(setup.engine.device, setup.trainer.device, len(rig.engines), len(policy.layout(setup.shape))),
            "disk": "safetensors file",
            "sleep_frees": ", ".join(first.capabilities.sleep_frees) or "nothing",
        },
    )


async def perform(
    rig: Rig,
    policy: Policy,
    seed: int,
    path: Path | None,
    watch: Callable[[Line], None] = lambda _: None,
    look: Look | None = None,
) -> tuple[Manifest, End]:
    """Run ``policy`` once; the history goes to ``path``, raw rollouts beside it, and each line to ``watch``.

    ``look`` scores published versions, see ``World``.
    """
    head = describe(rig, policy, seed)
    controller = Controller(policy, rig.setup.shape, seed)
    if path is None:
        return head, await World(rig, controller, head, watch, look=look).run()
    with Writer(path, flush_every=16) as writer:
        writer.begin(head)

        def record(line: Line) -> None:
            writer.write(line)
            watch(line)

        log = RolloutLog(path)
        try:
            return head, await World(rig, controller, head, record, log, look).run()
        finally:
            log.close()
