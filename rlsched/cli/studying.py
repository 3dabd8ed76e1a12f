"""``canary`` and ``learn``: what real engines say, and whether a policy's model learns."""

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import Parameter

from .. import report
from ..errors import InputError
from ..naming import parse
from .app import Engine, Folder, Json, Policies, Settings, app, err, out, print_json

CanaryEngines = Annotated[tuple[Engine | Literal["all"], ...], Parameter(name="--engine", negative=())]


@app.command
def canary(
    policies: Policies | None = None,
    *,
    engine: CanaryEngines = ("transformers",),
    steps: int | None = None,
    seed: int = 0,
    json: Json = False,
) -> int:
    """Update real engines rightly and wrongly, and read off their tokens which weights made them.

    Parameters
    ----------
    policies
        Also run these whole, on canary weights, and compare every token with its segment.
    engine
        May be repeated; ``all``: every one that is installed. ``transformers`` is the embedded one.
    steps
        Versions to publish in such a run.
    seed
        Of such a run.
    json
        Print one JSON object instead of tables.
    """
    import asyncio

    from ..real import installs
    from ..real.canary_matrix import matrix
    from ..real.canary_run import conduct

    chosen = [parse(p) for p in policies or ()]
    looked = installs.engines() if "all" in engine else [installs.require(e) for e in engine if e != "all"]
    kinds = list(dict.fromkeys(found.name for found in looked if found.ok))
    without = {found.name: found.why for found in looked if not found.ok}
    if not kinds:
        raise InputError("; ".join(f"engine {name}: {why}" for name, why in without.items()))
    for name, why in without.items():
        err.print(f"engine {name} is left out: {why}", markup=False, soft_wrap=True)
    matrices, audits = [], {}
    with report.progress(err, "updating engines") as bar:

        def say(what: str) -> None:
            if err.is_terminal:
                bar.update(bar.task_ids[0], description=what)
            else:
                err.print(what, markup=False, soft_wrap=True)

        for kind in kinds:
            matrices.append(asyncio.run(matrix(kind, say=say)))
            for policy in chosen:
                say(f"{kind}: running {policy.name}")
                audits[f"{kind}: {policy.name}"] = asyncio.run(conduct(policy, steps, seed, kind))
    good = all(m.good for m in matrices) and all(a.good for a in audits.values())
    if json:
        print_json({"ok": good, "engines": matrices, "left_out": without, "runs": audits})
    else:
        for found in matrices:
            report.canary(out, found)
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
    output: Folder = Path("out/learn"),
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

    from ..real.learning import Curve, good
    from ..real.learning import learn as study
    from ..validate import slug

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
        print_json({"ok": good(curves), "curves": curves, "picture": str(picture)})
    else:
        report.learning(out, curves)
        out.print(f"picture: {picture}", soft_wrap=True)
    return 0 if good(curves) else 1
