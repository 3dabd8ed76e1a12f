"""The command line. Exit status: 0 good, 1 a violation or a mismatch, 2 bad input."""

import sys
import tempfile
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, CycloptsError, Parameter
from rich.console import Console

from . import report
from .checker import check as check_history
from .compare import compare as compare_metrics
from .errors import InputError, WorldError
from .facts import End
from .history import Line, Reader, Writer, whole
from .history import schema as history_schema
from .metrics import Meter, measure
from .naming import parse, spec
from .policy import presets
from .replay import replay as replay_history
from .states import pick
from .states import states as cycles_of


class Pipe(Console):
    """A console whose reader may leave early."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


app = App(
    name="rlsched",
    help="Scheduling policies for RL post-training: simulate them, run them on real engines, check and compare.",
    help_on_error=False,
    version_flags=["--version"],
)
out = Pipe(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)
err = Pipe(stderr=True, highlight=False, emoji=False)

Settings = Annotated[tuple[str, ...], Parameter(name="--set", negative=())]
Changes = Annotated[tuple[str, ...], Parameter(name="--with", negative=())]
Engine = Literal["transformers"]
Policies = Annotated[list[str], Parameter(consume_multiple=True)]
Scales = Annotated[tuple[str, ...], Parameter(name="--scale-cost", negative=())]
Json = Annotated[bool, Parameter(name="--json", negative=())]
Files = Annotated[list[Path], Parameter(consume_multiple=True)]
Output = Annotated[Path | None, Parameter(name=["--output", "-o"])]


def _json(value: object) -> None:
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")


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
    from .checker import Checker
    from .sim.scenario import load
    from .sim.world import World

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
            _json({"policy": chosen.name, "ok": found.ok, "why": end.why, "metrics": meter.result()})
        else:
            report.metrics(out, {chosen.name: meter.result()})
            report.violations(out, found)
        return 0 if found.ok else 1

    if output is None:
        return go(None)
    with whole(output) as part, Writer(part) as writer:
        return go(writer)


@app.command
def run(
    policy: str,
    *,
    engine: Engine = "transformers",
    config: Path | None = None,
    steps: int | None = None,
    seed: int = 0,
    paced: bool = False,
    output: Output = None,
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Run a policy for real, check and replay its history, and print what it measures.

    Parameters
    ----------
    policy
        ``name[,slot.field=value…]``, ``path.py:attribute`` or ``module:attribute``.
    engine
        ``transformers``: continuous batching in a process of its own.
    config
        TOML file with the job; what it leaves out keeps its default.
    steps
        Versions to publish; overrides the job's.
    seed
        Of workload, sampling and policy.
    paced
        Hold every engine step and trainer phase to a declared minimum.
    output
        Where to write the history; raw rollouts go beside it.
    settings
        ``slot.field=value`` or ``slot=module:Class``; may be repeated.
    json
        Print one JSON object instead of a table.
    """
    import asyncio

    from .real.job import engines, perform
    from .real.rig import Rig
    from .real.setup import load

    setup = load(config, steps)
    setup = setup.paced() if paced else setup
    chosen = parse(policy, settings)

    async def go(path: Path) -> End:
        rig = await Rig.start(setup, engines(chosen, setup))
        try:
            return (await perform(rig, chosen, seed, path))[1]
        finally:
            await rig.close()

    with tempfile.TemporaryDirectory() as folder:
        path = output or Path(folder) / "history.jsonl"
        with report.progress(err, f"running {chosen.name}"):
            end = asyncio.run(go(path))
        if not end.ok:
            raise WorldError(end.why + (f" (history: {output})" if output else ""))
        reader = Reader(path)
        measured = measure(reader.manifest.devices, reader.events())
        found, again = check_history(Reader(path)), replay_history(Reader(path))
    good = found.ok and again.divergence is None
    if json:
        _json({"policy": chosen.name, "ok": good, "metrics": measured, "report": found, "replay": again})
    else:
        report.metrics(out, {chosen.name: measured})
        report.violations(out, found)
        if again.divergence is not None:
            report.divergence(out, path, again.divergence)
    return 0 if good else 1


@app.command
def validate(
    policies: Policies,
    *,
    engine: Engine = "transformers",
    config: Path | None = None,
    steps: int | None = None,
    repeats: int = 3,
    seed: int = 0,
    paced: bool = True,
    scale_cost: Scales = (),
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("out/validate"),
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Run policies for real, simulate the same job from fitted costs, check both, and compare.

    Parameters
    ----------
    policies
        The first one is the base of the ratios.
    engine
        ``transformers``: continuous batching in a process of its own.
    config
        TOML file with the job; what it leaves out keeps its default.
    steps
        Versions to publish; overrides the job's.
    repeats
        Real runs of each policy; three at least.
    seed
        Of workload, sampling and policy.
    paced
        Hold every engine step and trainer phase to a declared minimum, which makes the verdict decidable.
    scale_cost
        ``cost=factor``: multiply a fitted cost (step, train, sync, memory, control) on purpose.
    output
        Folder for the histories and the report.
    settings
        ``slot.field=value`` or ``slot=module:Class``, for all policies; may be repeated.
    json
        Print one JSON object instead of tables.
    """
    from .real.setup import load
    from .validate import validate as examine

    if repeats < 3:
        raise InputError(f"--repeats {repeats}: a spread needs at least three")
    setup = load(config, steps)
    setup = setup.paced() if paced else setup
    chosen = [parse(p, settings) for p in policies]
    if len({p.name for p in chosen}) < len(chosen):
        raise InputError("a policy is named twice")
    output.mkdir(parents=True, exist_ok=True)
    with report.progress(err, "validating") as bar:
        say = (lambda what: bar.update(bar.task_ids[0], description=what)) if err.is_terminal else err.print
        verdict = examine(chosen, setup, output, repeats=repeats, seed=seed, scale=scale_cost, say=say)
    page = report.write_verdict(verdict, output)
    if json:
        _json({"ok": verdict.good, "report": str(page), "verdict": verdict})
    else:
        report.verdict(out, verdict)
        out.print(f"report: {page}", soft_wrap=True)
    return 0 if verdict.good else 1


@app.command
def canary(policies: Policies | None = None, *, steps: int | None = None, seed: int = 0, json: Json = False) -> int:
    """Update real engines rightly and wrongly, and read off their tokens which weights made them.

    Parameters
    ----------
    policies
        Also run these whole, on canary weights, and compare every token with its segment.
    steps
        Versions to publish in such a run.
    seed
        Of such a run.
    json
        Print one JSON object instead of tables.
    """
    import asyncio

    from .real.canary_matrix import matrix
    from .real.canary_run import conduct

    chosen = [parse(p) for p in policies or ()]
    with report.progress(err, "updating engines"):
        cells = asyncio.run(matrix())
    audits = {}
    for policy in chosen:
        with report.progress(err, f"running {policy.name}"):
            audits[policy.name] = asyncio.run(conduct(policy, steps, seed))
    good = all(c.good for c in cells) and all(a.good for a in audits.values())
    if json:
        _json({"ok": good, "cells": cells, "runs": audits})
    else:
        report.canary(out, cells)
        report.audits(out, audits)
    return 0 if good else 1


@app.command
def learn(
    policy: str,
    *,
    seeds: int = 3,
    steps: int = 100,
    every: int = 10,
    control: Literal["withheld", "shuffled"] | None = None,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("out/learn"),
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Let a policy learn for real and score held-out prompts through the engine, under the versions installed there.

    Status 0: the mean score went from at most 0.3 to at least 0.7; with a control, no run gained more than 0.1.

    Parameters
    ----------
    policy
        ``name[,slot.field=value…]``, ``path.py:attribute`` or ``module:attribute``.
    seeds
        Runs, with seeds 0, 1, …: of version 0, sampling and policy.
    steps
        Versions to publish.
    every
        Versions between two exams.
    control
        ``withheld``: every install sends version 0; ``shuffled``: rewards change places within each group.
    output
        Folder for histories, raw rollouts, curves and learning.svg, which shows every curve in the folder.
    settings
        ``slot.field=value`` or ``slot=module:Class``; may be repeated.
    json
        Print one JSON object instead of a table.
    """
    import asyncio

    from .real.learning import Curve, good
    from .real.learning import learn as study
    from .validate import slug

    if seeds < 1:
        raise InputError(f"--seeds {seeds}: it must be at least 1")
    chosen = parse(policy, settings)
    output.mkdir(parents=True, exist_ok=True)
    curves: list[Curve] = []
    for seed in range(seeds):
        name = "-".join(filter(None, (slug(chosen.name), control, str(seed))))
        with report.progress(err, f"{chosen.name}: seed {seed}"):
            curve = asyncio.run(study(chosen, seed, steps, every, control, output / f"{name}.jsonl.zst"))
        (output / f"{name}.curve.json").write_bytes(msgspec.json.encode(curve))
        curves.append(curve)
    everything = [msgspec.json.decode(p.read_bytes(), type=Curve) for p in sorted(output.glob("*.curve.json"))]
    picture = report.write_learning(everything, output / "learning.svg")
    if json:
        _json({"ok": good(curves), "curves": curves, "picture": str(picture)})
    else:
        report.learning(out, curves)
        out.print(f"picture: {picture}", soft_wrap=True)
    return 0 if good(curves) else 1


@app.command
def check(histories: Files, *, salvage: bool = False, json: Json = False) -> int:
    """Check recorded histories against the invariants that their policies promise.

    Parameters
    ----------
    histories
        Files written by ``simulate`` or ``run``.
    salvage
        Read a file that was cut within a line up to its last whole event.
    json
        Print one JSON object a file instead of text.
    """
    good = True
    for path in histories:
        with report.progress(err, f"checking {path}"):
            found = check_history(Reader(path, salvage))
        good &= found.ok
        if json:
            _json({"history": str(path), "ok": found.ok, "report": found})
        else:
            what = f"{path}: {found.events} events{', open: checked as a prefix' if found.open else ''}"
            out.print(what, markup=False, soft_wrap=True)
            report.violations(out, found)
    return 0 if good else 1


@app.command
def replay(history: Path, *, salvage: bool = False, json: Json = False) -> int:
    """Feed a history's facts to a fresh controller and demand the recorded commands and notes, in order.

    Parameters
    ----------
    history
        File written by ``simulate`` or ``run``.
    salvage
        Read a file that was cut within a line up to its last whole event.
    json
        Print one JSON object instead of text.
    """
    found = replay_history(Reader(history, salvage))
    if json:
        _json({"history": str(history), "ok": found.divergence is None, "replay": found})
    elif found.divergence is None:
        what = f"{history}: exact: {found.facts} facts gave the {found.answers} recorded commands and notes"
        out.print(what, markup=False, soft_wrap=True)
    else:
        report.divergence(out, history, found.divergence)
    return 0 if found.divergence is None else 1


@app.command
def states(history: Path, *, version: int | None = None, salvage: bool = False, json: Json = False) -> int:
    """Show a cycle of a history as steps: who has the memory, who holds which version, and by which rule.

    Parameters
    ----------
    history
        File written by ``simulate`` or ``run``.
    version
        Show the cycle that produced it; left out, the first one that shows the most.
    salvage
        Read a file that was cut within a line up to its last whole event.
    json
        Print one JSON object instead of a table.
    """
    reader = Reader(history, salvage)
    cycle = pick(cycles_of(reader.manifest, reader.events()), version)
    if json:
        _json({"history": str(history), "cycle": cycle})
    else:
        report.states(out, reader.manifest, cycle)
    return 0


@app.command
def compare(real: Path, sim: Path, *, within: float = 0.1, json: Json = False) -> int:
    """Compare what two histories measure, a real one's first.

    Parameters
    ----------
    real
        History of a real run.
    sim
        History of a simulated run of the same workload.
    within
        Largest relative difference of step, generation, train and sync time that still matches.
    json
        Print one JSON object instead of a table.
    """
    first, second = Reader(real), Reader(sim)
    a, b = (measure(r.manifest.devices, r.events()) for r in (first, second))
    rows = compare_metrics([a], b, within)
    if json:
        _json({"ok": all(r.good for r in rows), "rows": rows})
    else:
        report.comparison(out, {first.manifest.policy.name: rows})
    return 0 if all(r.good for r in rows) else 1


@app.command
def policies(*, json: Json = False) -> int:
    """Show the presets, their slots and the fields of each."""
    specs = [spec(p) for p in presets().values()]
    if json:
        _json(specs)
    else:
        report.policies(out, specs)
    return 0


@app.command
def schema() -> int:
    """Print the JSON Schema of a history's lines."""
    _json(history_schema())
    return 0


@app.command
def scenario() -> int:
    """Print the default scenario as TOML, each field with its unit."""
    from .sim.template import template

    sys.stdout.write(template())
    return 0


def main(arguments: list[str] | None = None) -> None:
    """Entry point: one line and status 2 for bad input, one line and status 1 for a run that failed."""
    try:
        status = app(arguments, exit_on_error=False, print_error=False, result_action="return_value")
    except (InputError, CycloptsError) as error:
        err.print(f"rlsched: {' '.join(str(error).split())}", markup=False, soft_wrap=True)
        sys.exit(2)
    except WorldError as error:
        err.print(f"rlsched: {error}", markup=False, soft_wrap=True)
        sys.exit(1)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(0)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(status)
