"""The formulas of staleness, each in one pure function. Counts are of groups, versions are integers."""


def capacity(eta: int, concurrency: int | None, b: int, version: int, accepted: int, running: int) -> int:
    """Groups that may be admitted now; may be negative.

    ``min(C - running, (η + v + 1)·B - (accepted + running))`` with C = None meaning B, and B and C
    at least 1. The arithmetic of AReaL v2.1.0's ``StalenessManager``; ``b`` is B, groups per version.
    """
    b = max(1, b)
    slots = max(1, b if concurrency is None else concurrency) - running
    return min(slots, (eta + version + 1) * b - (accepted + running))


def outstanding_limit(eta: int, b: int) -> int:
    """P1: the most groups that may be unpublished, buffered or running at once."""
    return (eta + 1) * b


def restored(version: int, b: int, buffered: int = 0) -> int:
    """What ``accepted`` must be after recovery at ``version``, lest the cap be inflated or starved."""
    return version * max(1, b) + buffered


def age(consuming: int, oldest: int) -> int:
    """Age in versions: the version being consumed from (x at train_start) minus that of the oldest token."""
    return consuming - oldest
