"""The command line. Exit status: 0 good, 1 a violation or a mismatch, 2 bad input."""

import sys

from cyclopts import CycloptsError

from ..errors import InputError, WorldError
from . import about, checking, reading, running, simulating, studying
from .app import app, err

__all__ = ["about", "app", "checking", "main", "reading", "running", "simulating", "studying"]


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
