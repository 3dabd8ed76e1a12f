"""How long a child may keep silent before it is taken for dead."""

from msgspec import Struct

from rlsched.errors import InputError


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds. Generation has no limit of its own: an engine may take as long as it likes, if it answers."""

    control_s: float = 60.0
    """From an order to its answer. It must exceed the longest step of an engine, its first one included: an order
    waits for the step's end. Also how long a process may stand still (SIGSTOP)."""
    work_s: float = 3600.0
    """The same for the trainer, which answers nothing during a training call."""
    start_s: float = 900.0
    """From a child's start until it is ready."""
    beat_s: float = 5.0
    """Silence after which an engine is asked for a sign of life."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if getattr(self, name) <= 0:
                raise InputError(f"limits.{name} is {getattr(self, name):g}: it must be over 0 seconds")
