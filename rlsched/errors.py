"""The errors that a user can mend: each one is a single line that names the place and the mend."""


class InputError(ValueError):
    """Bad input: a file, a field or an argument. The command line prints it and exits with 2."""


class BusyError(InputError):
    """Another run is writing the file."""


class PolicyError(InputError):
    """A policy slot raised, or answered something that can't be done."""


class WorldError(RuntimeError):
    """The run can't go on: a process died or a step timed out. What was recorded stays readable."""
