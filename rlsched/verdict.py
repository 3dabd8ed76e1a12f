"""The verdict over real and simulated runs of the same policies.

A paced verdict is void when a policy's real step times spread by more than 10 %, or when work
overran its declared minima by more than 1 % of a run: then nothing was decided.
"""

from msgspec import Struct

from .checker import Report
from .compare import Row, compare, ratio, spread
from .metrics import Metrics
from .replay import Replay

WITHIN = 0.1
"""Largest relative error of a prediction, where twice the real spread is not larger."""
MOST_SPREAD = 0.1
MOST_OVERRUN = 0.01


class Run(Struct, frozen=True):
    """One run, real or simulated, with what was found about it."""

    history: str
    metrics: Metrics
    report: Report
    replay: Replay
    overrun: float = 0.0
    """Largest share of the run by which one process overran its declared minima."""

    @property
    def good(self) -> bool:
        """No violation, and replayed exactly."""
        return self.report.ok and self.replay.divergence is None


class Verdict(Struct, frozen=True):
    """All that a validation found, by policy."""

    real: dict[str, list[Run]]
    sim: dict[str, Run]
    rows: dict[str, list[Row]]
    void: list[str]
    """Why nothing was decided; empty: it was."""
    paced: bool

    @property
    def good(self) -> bool:
        """Everything checked, replayed and matched."""
        runs = [r for group in self.real.values() for r in group] + list(self.sim.values())
        return not self.void and all(r.good for r in runs) and all(r.good for rows in self.rows.values() for r in rows)


def judge(real: dict[str, list[Run]], sim: dict[str, Run], paced: bool) -> Verdict:
    """Compare, and say whether the real runs allow a verdict at all."""
    rows: dict[str, list[Row]] = {}
    base, *_ = real
    for name, runs in real.items():
        rows[name] = compare([r.metrics for r in runs], sim[name].metrics, WITHIN)
        if name != base:
            ours, theirs = [r.metrics for r in runs], [r.metrics for r in real[base]]
            steps = sim[name].metrics.step_s, sim[base].metrics.step_s
            rows[name].append(ratio(base, ours, theirs, *steps, WITHIN))
    void = []
    for name, runs in real.items() if paced else ():
        wide = spread([r.metrics.step_s for r in runs])
        if wide > MOST_SPREAD:
            void.append(f"{name}: real step times spread by {wide:.0%}")
        late = max(r.overrun for r in runs)
        if late > MOST_OVERRUN:
            void.append(f"{name}: work overran its declared minima by {late:.1%} of a run")
    return Verdict(real, sim, rows, void, paced)
