"""The checker: reads any history and says which invariants it violates, and which events show it."""

from .checker import Checker, check
from .invariants import INVARIANTS
from .report import Report, Violation, Witness

__all__ = ["INVARIANTS", "Checker", "Report", "Violation", "Witness", "check"]
