"""``run`` and ``validate``: policies on real engines."""

import tempfile
from pathlib import Path

from .. import report
from ..checker import check as check_history
from ..errors import InputError, WorldError
from ..facts import End
from ..history import Reader
from ..metrics import measure
from ..naming import parse
from ..replay import replay as replay_history
from .app import Engine, Folder, Json, Output, Policies, Scales, Settings, app, err, out, print_json


@app.command
def run(
    policy: str,
    *,
    engine: Engine | None = None,
    interpreter: str | None = None,
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
        ``transformers`` is the embedded one; ``vllm``, ``vllm-async``, ``vllm-server`` and ``sglang`` run in
        environments of their own (docs/engines.md). Left out, it is the job's.
    interpreter
        The Python that has the engine, if it isn't where ``rlsched engines`` looks.
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

    from ..real.job import engines, perform
    from ..real.rig import Rig
    from ..real.setup import load

    setup = load(config, steps, engine, interpreter)
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
        print_json({"policy": chosen.name, "ok": good, "metrics": measured, "report": found, "replay": again})
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
    engine: Engine | None = None,
    interpreter: str | None = None,
    config: Path | None = None,
    steps: int | None = None,
    repeats: int = 3,
    seed: int = 0,
    paced: bool = True,
    scale_cost: Scales = (),
    output: Folder = Path("out/validate"),
    settings: Settings = (),
    json: Json = False,
) -> int:
    """Run policies for real, simulate the same job from fitted costs, check both, and compare.

    Parameters
    ----------
    policies
        The first one is the base of the ratios.
    engine
        ``transformers`` is the embedded one; ``vllm``, ``vllm-async``, ``vllm-server`` and ``sglang`` run in
        environments of their own (docs/engines.md). Left out, it is the job's.
    interpreter
        The Python that has the engine, if it isn't where ``rlsched engines`` looks.
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
    from ..real.setup import load
    from ..validate import validate as examine

    if repeats < 3:
        raise InputError(f"--repeats {repeats}: a spread needs at least three")
    setup = load(config, steps, engine, interpreter)
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
        print_json({"ok": verdict.good, "report": str(page), "verdict": verdict})
    else:
        report.verdict(out, verdict)
        out.print(f"report: {page}", soft_wrap=True)
    return 0 if verdict.good else 1
