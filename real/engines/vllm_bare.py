"""vLLM as a careless integration has it: after an update, prompts go on to share KV that older weights computed.

For canary tests only. Run as `PYTHON -m rlsched.real.engines.vllm_bare --fd N --parent PID`.
"""

from __future__ import annotations

from .entry import main, run
from .vllm import VllmEngine


class BareVllmEngine(VllmEngine):
    """It flushes when it is told to, and not otherwise."""

    renewing = False


if __name__ == "__main__":
    run(lambda: main(BareVllmEngine))
