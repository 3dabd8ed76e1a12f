"""The embedded engine without its guards (see `careless`): it shares KV blocks as the library does.

For canary tests only. Run as `python -m rlsched.real.engines.bare --fd N --parent PID`.
"""

from __future__ import annotations

from .careless import Careless, CarelessResidence
from .entry import run
from .transformers import TransformersEngine, main


class BareEngine(Careless, TransformersEngine):
    """An engine as a careless integration has it."""

    residence = CarelessResidence
    sharing = True


if __name__ == "__main__":
    run(lambda: main(BareEngine))
