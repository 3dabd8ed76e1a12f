"""``simulate`` and ``scenario``: policies in virtual time."""

import sys
from pathlib import Path

from .. import report
from ..history import Line, Writer, whole
from ..metrics import Meter
from ..naming import parse
from .app import Changes, Json, Output, Settings, app, err, out, print_json


@app.command
def simulate(
    policy: str,
    *,
    scenario: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    output: Output = None,
    settings: Settings = (),
    changes: Changes = (),
    json: Json = False,
) -> int:
    """Simulate a policy in virtual time, check the history, and print what it measures.

    Parameters
    ----------
    policy
        ``name[,slot.field=value…]``, ``path.py:attribute`` or ``module:attribute``.
    scenario
        TOML file; what it leaves out keeps its default (see ``rlsched scenario``).
    steps
        Versions to publish; overrides the scenario's.
    seed
        Same seed, same bytes.
    output
        Where to write the history (JSON Lines; zstd when the name ends with .zst).
    settings
        ``slot.field=value`` or ``slot=module:Class``; may be repeated.
    changes
        ``table.field=value``, a change to the scenario; may be repeated.
    json
        Print one JSON object instead of a table.
    """
    from ..checker import Checker
    from ..sim.scenario import load
    from ..sim.world import World

    more = (f"shape.steps={steps}",) if steps is not None else ()
    world_scenario = load(scenario, (*changes, *more))
    chosen = parse(policy, settings)

    def go(write: Writer | None) -> int:
        lines = 1

        def record(line: Line) -> None:
            nonlocal lines
            lines += 1
            checker.feed(lines, line)  # type: ignore[arg-type]
            meter.feed(line)  # type: ignore[arg-type]
            if write is not None:
                write.write(line)

        world = World(world_scenario, chosen, seed, record)
        checker, meter = Checker(world.manifest), Meter(world.devices)
        if write is not None:
            write.begin(world.manifest)
        with report.progress(err, f"simulating {chosen.name}"):
            end = world.run()
        found = checker.close(open=False)
        if json:
            print_json({"policy": chosen.name, "ok": found.ok, "why": end.why, "metrics": meter.result()})
        else:
            report.metrics(out, {chosen.name: meter.result()})
            report.violations(out, found)
        return 0 if found.ok else 1

    if output is None:
        return go(None)
    with whole(output) as part, Writer(part) as writer:
        return go(writer)


@app.command
def scenario() -> int:
    """Print the default scenario as TOML, each field with its unit."""
    from ..sim.template import template

    sys.stdout.write(template())
    return 0
