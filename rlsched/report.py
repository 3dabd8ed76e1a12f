"""Tables and lines for people, with rich."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from . import chart
from .checker import Report
from .compare import JUDGED, SHOWN, Row
from .labels import headings
from .manifest import Manifest
from .metrics import Metrics
from .naming import PolicySpec
from .outcome import Outcome
from .replay import Divergence
from .states import Cycle
from .verdict import Verdict

if TYPE_CHECKING:
    from .real.canary_faults import Cell
    from .real.canary_matrix import Matrix
    from .real.canary_run import Audit
    from .real.engines import Capabilities
    from .real.installs import EngineKind, Installed
    from .real.learning import Curve

_COLORS = ("#1f77b4", "#2ca02c", "#d62728", "#9467bd", "#7f7f7f")

_TITLES = {
    "step_s": "step s",
    "generation_s": "generation s",
    "wait_s": "wait s",
    "train_s": "train s",
    "sync_s": "sync s",
    "tokens_per_s": "tokens/s",
    "engine_idle": "engine idle",
    "trainer_idle": "trainer idle",
    "age_tv": "age, total variation",
}


@contextmanager
def progress(console: Console, what: str) -> Iterator[Progress]:
    """A spinner with the elapsed time, on a terminal only."""
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with bar:
        bar.add_task(what, total=None)
        yield bar


def number(name: str, value: float) -> str:
    """A measure with its unit's precision."""
    if name.endswith("idle"):
        return f"{value:.0%}"
    if name == "tokens_per_s":
        return f"{value:,.0f}"
    return f"{value:.3f}"


def metrics(console: Console, found: dict[str, Metrics]) -> None:
    """One column a run."""
    table = Table("per version", *found, title_justify="left")
    for name in (*JUDGED, *SHOWN):
        table.add_row(_TITLES[name], *(number(name, getattr(m, name)) for m in found.values()))
    table.add_row("versions", *(str(m.versions) for m in found.values()))
    table.add_row("rollouts interrupted", *(str(m.interrupted) for m in found.values()))
    table.add_row("groups by age", *(ages(m.ages) for m in found.values()))
    console.print(table)


def ages(histogram: dict[int, int]) -> str:
    """A histogram of ages in one line."""
    return ", ".join(f"{age}: {n}" for age, n in histogram.items()) or "none"


def violations(console: Console, found: Report) -> None:
    """What the checker found, each with the events that show it."""
    for v in found.violations:
        console.print(f"{v.id}: {v.statement}", markup=False, soft_wrap=True)
        for line, text in v.witness:
            console.print(f"    line {line}: {text}", markup=False, soft_wrap=True)
    total = sum(found.counts.values())
    if total > len(found.violations):
        console.print(f"… {total} violations in all: " + ", ".join(f"{i} {n}" for i, n in found.counts.items()))
    if found.failed:
        console.print(f"the run failed, and was checked up to there: {found.failed}", markup=False, soft_wrap=True)
    if found.ok:
        console.print("no violation")


def divergence(console: Console, path: Path, found: Divergence) -> None:
    """Where a replay left its history."""
    console.print(f"{path}, line {found.line}: the controller answers otherwise", markup=False, soft_wrap=True)
    console.print(f"    recorded: {found.recorded}", markup=False, soft_wrap=True)
    console.print(f"    replayed: {found.replayed}", markup=False, soft_wrap=True)


def states(console: Console, manifest: Manifest, cycle: Cycle) -> None:
    """The steps of a cycle, one row each."""
    table = Table("", *headings(manifest), show_lines=True)
    for number, step in enumerate(cycle.steps, start=1):
        table.add_row(f"{number}. {step.title}", *msgspec.structs.astuple(step.state))
    policy = manifest.policy.name
    console.print(f"{policy}: v = {cycle.version - 1}, v+1 = {cycle.version}", markup=False, soft_wrap=True)
    console.print(table)


def comparison(console: Console, found: dict[str, list[Row]]) -> None:
    """Real against simulated, a block a policy."""
    table = Table("policy", "measure", "real", "spread", "simulated", "error", "bound", "")
    for policy, rows in found.items():
        for i, r in enumerate(rows):
            bound = "" if r.bound is None else f"{r.bound:.0%}"
            error = "" if r.name == "age_tv" else f"{r.error:+.1%}"
            mark = "" if r.bound is None else ("ok" if r.good else "MISS")
            table.add_row(
                policy if not i else "",
                _TITLES.get(r.name, r.name),
                "" if r.name == "age_tv" else number(r.name, r.real),
                f"{r.spread:.1%}" if r.name != "age_tv" else f"{r.spread:.3f}",
                number(r.name, r.sim),
                error,
                bound,
                mark,
            )
        table.add_section()
    console.print(table)


def engines(console: Console, found: "list[Installed]") -> None:
    """The engines, one row each."""
    table = Table("engine", "version", "usable", "interpreter, or what is missing")
    for e in found:
        table.add_row(e.name, e.version or "-", "yes" if e.ok else "no", e.interpreter if e.ok else e.why)
    console.print(table)


def capabilities(console: Console, found: "dict[EngineKind, Capabilities]") -> None:
    """What engines can do here, one column each."""
    table = Table("", *found)
    for field in next(iter(found.values())).__struct_fields__[1:]:
        values = [getattr(c, field) for c in found.values()]
        table.add_row(field.replace("_", " "), *(_able(v) for v in values))
    console.print(table)


def _able(value: object) -> str:
    """A capability, as a cell."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) or "nothing"
    return f"{value:,}" if isinstance(value, int) else str(value)


def policies(console: Console, specs: list[PolicySpec]) -> None:
    """The presets, one row a slot."""
    table = Table("policy", "slot", "class", "fields")
    for s in specs:
        for i, (slot, made) in enumerate(s.slots.items()):
            fields = ", ".join(f"{k}={v}" for k, v in made.fields.items())
            table.add_row(s.name if not i else "", slot, made.type.rpartition(":")[2], fields)
        table.add_section()
    console.print(table)


def verdict(console: Console, found: Verdict) -> None:
    """Real against simulated, and what checker and replay said."""
    comparison(console, found.rows)
    for name, runs in found.real.items():
        everything = [*runs, found.sim[name]]
        violated = sum(sum(r.report.counts.values()) for r in everything)
        exact = sum(r.replay.divergence is None for r in everything)
        console.print(
            f"{name}: {violated} violations, {exact} of {len(everything)} histories replay exactly,"
            f" rollouts interrupted and resumed: {', '.join(str(r.metrics.interrupted) for r in runs)} real,"
            f" {found.sim[name].metrics.interrupted} simulated",
            soft_wrap=True,
        )
        console.print(
            f"    groups by age, real {ages(runs[0].metrics.ages)}; simulated {ages(found.sim[name].metrics.ages)}"
        )
    for why in found.void:
        console.print(f"void: {why}", soft_wrap=True)
    misses = sum(not r.good for rows in found.rows.values() for r in rows)
    if found.void:
        console.print("nothing was decided")
    else:
        console.print("the simulation matches" if not misses else f"{misses} measures miss their bound")


def canary(console: Console, found: "Matrix") -> None:
    """The matrix of handlings on one engine, and what is not as it must be."""
    console.print(_handlings(found))
    for fault in dict.fromkeys(c.fault for c in found.cells if c.fault != "none"):
        same = [c for c in found.cells if c.fault == fault]
        # Checksums differ from cell to cell.
        guards = sorted({re.sub(r"\b[0-9a-f]{32}\b", "…", c.guard) for c in same})
        console.print(f"{fault}: breaks {same[0].invariant}; guard: {' / '.join(guards)}", markup=False, soft_wrap=True)
    for what, why in found.left_out.items():
        console.print(f"left out: {what}: {why}", markup=False, soft_wrap=True)
    right = [c for c in found.cells if c.fault == "none"]
    wrong = [c for c in found.cells if c.fault != "none"]
    console.print(
        f"{found.engine}: {sum(c.good for c in right)} of {len(right)} right handlings decode what they claim;"
        f" {sum(c.good for c in wrong)} of {len(wrong)} wrong ones show their fault in the tokens",
        soft_wrap=True,
    )
    told = [(c.fault, a.own.right) for c in found.cells for a in c.answers if a.own is not None]
    if told:
        lies = ["right handlings" if fault == "none" else fault for fault, true in told if not true]
        where = f" ({', '.join(dict.fromkeys(lies))})" if lies else ""
        what = f"its own labels are right of {len(told) - len(lies)} requests, wrong of {len(lies)}{where}"
        console.print(f"{found.engine}: {what}", markup=False, soft_wrap=True)
    for c in found.cells:
        h = c.handling
        where = ", ".join(filter(None, (c.fault, h.running, f"pause {h.pause}", c.kv, c.transport)))
        for answer in c.answers:
            for m in () if c.good else answer.mismatches:
                console.print(f"not as it must be: {where}: {answer.request}: {m}", markup=False, soft_wrap=True)
            if c.fault == "none" and answer.own is not None and not answer.own.right:
                console.print(f"{where}: {answer.request}: {answer.own}", markup=False, soft_wrap=True)


def _handlings(found: "Matrix") -> Table:
    """Rows that differ in nothing but the transport are one."""
    told = any(c.own for c in found.cells)
    label = ("own label",) if told else ()
    columns = ("fault", "request", "pause", "KV", "transport", "seen in the tokens", *label, "")
    title = f"{found.engine} {found.version} on {found.device}"
    table = Table(*columns, box=SIMPLE_HEAD, title=title, title_justify="left")
    rows: dict[tuple[str, ...], list[str]] = {}
    for c in found.cells:
        h, labels = c.handling, [c.own] if told else []
        fault = "none: right" if c.fault == "none" else str(c.fault)
        key = (fault, h.running, h.pause, c.kv, _seen(c), *labels, "ok" if c.good else "MISS")
        rows.setdefault(key, []).append(c.transport)
    before = ""
    for (fault, running, pause, kv, *rest), transports in rows.items():
        if fault != before:
            table.add_section()
        table.add_row(fault if fault != before else "", running, pause, kv, ", ".join(transports), *rest)
        before = fault
    return table


def _seen(cell: "Cell") -> str:
    """What a cell's tokens said, without its numbers: so it compares with other transports'."""
    if cell.shown:
        said = cell.shown
    else:
        said = "; ".join(f"{a.request}: {', '.join(str(r.said or 'nothing') for r in a.said)}" for a in cell.answers)
    for version, name in ((cell.old, "old"), (cell.old + 1, "new")):
        said = re.sub(rf"\bv{version}\b", name, said)
    return said


def audits(console: Console, found: "dict[str, Audit]") -> None:
    """What the tokens of whole runs said."""
    for name, a in found.items():
        console.print(
            f"{name}: {a.tokens} tokens of {a.rollouts} rollouts, {a.mixed} of them of several versions:"
            f" {len(a.labels)} contradict their segments, {len(a.installs)} what was installed",
            soft_wrap=True,
        )
        for rollout, wrong in (a.labels | a.installs).items():
            for m in wrong:
                console.print(f"    rollout {rollout}: {m}", soft_wrap=True)


def outcome(console: Console, found: Outcome) -> None:
    """A step of the GPU check, as it ends."""
    what = "; ".join(filter(None, (found.why, ", ".join(f"{name} {value}" for name, value in found.seen.items()))))
    console.print(f"{found.status} {found.step}, {found.seconds:.1f} s: {what}", soft_wrap=True, markup=False)


def outcomes(console: Console, found: Sequence[Outcome]) -> None:
    """All steps of the GPU check, with what each saw."""
    table = Table("step", "", "s", "seen", "", box=SIMPLE_HEAD)
    for each in found:
        seen = [*([("", each.why)] if each.why else []), *each.seen.items()] or [("", "")]
        for i, (name, value) in enumerate(seen):
            head = (each.step, each.status, f"{each.seconds:.1f}") if i == 0 else ("", "", "")
            table.add_row(*head, name, str(value))
    console.print(table)


def write_verdict(found: Verdict, folder: Path) -> Path:
    """The verdict as text and as JSON in ``folder``; the path of the text."""
    page = folder / "report.txt"
    with page.open("w") as file:
        verdict(Console(file=file, width=120, highlight=False), found)
    (folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(found)))
    return page


def learning(console: Console, curves: "Sequence[Curve]") -> None:
    """Held-out scores of runs of one policy, a column a seed."""
    title = " ".join(filter(None, (curves[0].policy, curves[0].control)))
    table = Table("version", *(f"seed {c.seed}" for c in curves), "mean", title=title, title_justify="left")
    for points in zip(*(c.points for c in curves), strict=True):
        scores = [p.score for p in points]
        table.add_row(str(points[0].version), *(f"{s:.3f}" for s in (*scores, fmean(scores))))
    console.print(table)


def write_learning(curves: "Sequence[Curve]", path: Path) -> Path:
    """A picture of ``curves`` at ``path``: one color a policy and control."""
    colors: dict[str, str] = {}
    lines = []
    for c in sorted(curves, key=lambda c: (c.control or "", c.policy, c.seed)):
        name = c.control or c.policy
        color = colors.setdefault(name, _COLORS[len(colors) % len(_COLORS)])
        lines.append(chart.Line(name, color, [(p.version, p.score) for p in c.points]))
    path.write_text(chart.chart("Mean reward of held-out prompts, through the engine", "version", lines))
    return path
