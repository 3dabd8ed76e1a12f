"""``check``, ``replay``, ``states`` and ``compare``: recorded histories."""

from pathlib import Path

from .. import report
from ..checker import check as check_history
from ..compare import compare as compare_metrics
from ..history import Reader
from ..metrics import measure
from ..replay import replay as replay_history
from ..states import pick
from ..states import states as cycles_of
from .app import Files, Json, app, err, out, print_json


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
            print_json({"history": str(path), "ok": found.ok, "report": found})
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
        print_json({"history": str(history), "ok": found.divergence is None, "replay": found})
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
        print_json({"history": str(history), "cycle": cycle})
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
        print_json({"ok": all(r.good for r in rows), "rows": rows})
    else:
        report.comparison(out, {first.manifest.policy.name: rows})
    return 0 if all(r.good for r in rows) else 1
