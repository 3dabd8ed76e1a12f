"""What became of a step of a check."""

from typing import Any, Literal

from msgspec import Struct

Seen = dict[str, Any]
"""Names, with units where they have any, and what was seen."""


class Outcome(Struct, frozen=True):
    """One step."""

    step: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float = 0.0
    seen: Seen = {}
    why: str = ""
    """It failed or was skipped."""
