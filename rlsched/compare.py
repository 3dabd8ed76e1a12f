"""Comparing measurements: a prediction against the spread of real repeats."""

from collections.abc import Sequence
from statistics import median

from msgspec import Struct

from .metrics import Metrics, total_variation

JUDGED = ("step_s", "generation_s", "train_s", "sync_s")
"""Measures that a verdict depends on."""

SHOWN = ("wait_s", "tokens_per_s", "engine_idle", "trainer_idle")
"""Measures that are printed beside them."""

RESOLUTION = 2e-3
"""Seconds below which two durations are taken for equal: what a process switch may cost."""


class Row(Struct, frozen=True):
    """One measure: the repeats' median and spread, (max - min)/median, and the prediction."""

    name: str
    real: float
    spread: float
    sim: float
    error: float
    """(sim - real)/real."""
    bound: float | None
    """Largest absolute error that matches; None: not judged."""
    good: bool


def spread(values: Sequence[float]) -> float:
    """(max - min)/median; 0 for a single value or a median of 0."""
    middle = median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def row(name: str, real: Sequence[float], sim: float, within: float | None) -> Row:
    """Compare ``sim`` with the median of ``real``: within ``within`` or twice the spread (None: not judged)."""
    middle, width = median(real), spread(real)
    error = (sim - middle) / middle if middle else (0.0 if not sim else 1.0)
    bound = None if within is None else max(within, 2 * width)
    good = bound is None or abs(error) <= bound or abs(sim - middle) <= RESOLUTION
    return Row(name, middle, width, sim, error, bound, good)


def compare(real: Sequence[Metrics], sim: Metrics, within: float = 0.1) -> list[Row]:
    """All measures of real repeats against one simulation."""
    rows = [row(n, [getattr(m, n) for m in real], getattr(sim, n), within) for n in JUDGED]
    rows += [row(n, [getattr(m, n) for m in real], getattr(sim, n), None) for n in SHOWN]
    distance = median(total_variation(m.ages, sim.ages) for m in real)
    apart = max(total_variation(a.ages, b.ages) for a in real for b in real)
    return [*rows, Row("age_tv", 0.0, apart, distance, distance, None, True)]


def ratio(
    base: str, real: Sequence[Metrics], real_base: Sequence[Metrics], sim: float, sim_base: float, within: float
) -> Row:
    """Step time over that of policy ``base``, real and simulated; repeat i is paired with repeat i."""
    ratios = [a.step_s / b.step_s for a, b in zip(real, real_base, strict=True)]
    return row(f"step / {base}", ratios, sim / sim_base, within)
