"""vLLM's own server, `vllm.entrypoints.openai.api_server`, in a process that dies with its parent.

Run as `python -m rlsched.real.engines.vllm_server ARGUMENTS`, with that server's arguments.
"""

from __future__ import annotations

import runpy

from .family import die_with_parent

if __name__ == "__main__":
    die_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")
