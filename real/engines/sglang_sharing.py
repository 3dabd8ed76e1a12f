"""SGLang with its prefix cache on, as a careless integration has it; for canary tests only.

Requests share the KV of equal prefixes, and an update that nobody flushes after leaves KV of older weights there: the
same prompt meets it again. Run as `python -m rlsched.real.engines.sglang_sharing --fd N --parent PID`.
"""

from __future__ import annotations

from .hosted import main
from .sglang import SglangEngine


class SharingEngine(SglangEngine):
    """An engine whose updates want a flush."""

    sharing = True


if __name__ == "__main__":
    main(SharingEngine)
