"""``gpu``: everything that only a GPU can show, as one prepared check."""

from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import Parameter

from .. import report
from ..errors import InputError
from .app import Folder, Json, app, out, print_json

Steps = Annotated[tuple[str, ...], Parameter(name="--step", negative=())]


@app.command
def gpu(
    *,
    dry: bool = False,
    minutes: float = 8.0,
    step: Steps = (),
    vllm_path: str = "",
    output: Folder = Path("out/gpu"),
    json: Json = False,
) -> int:
    """Check the CUDA paths on this machine's GPU, which engine and trainer share; without one, say so and run nothing.

    Status 0: every step passed, was skipped for want of vLLM, or there is no GPU. A step that fails stops no other.

    Parameters
    ----------
    dry
        Run the same steps on the CPU, with small models: memory is the process's, IPC is shared memory.
    minutes
        After these, what has not run counts as failed.
    step
        Run this step only; may be repeated.
    vllm_path
        Folders, separated by colons, that hold a vLLM for this interpreter; otherwise RLSCHED_VLLM_PYTHON counts.
    output
        Folder for histories, reports and logs; ``gpu.json`` has all figures.
    json
        Print one JSON object instead of lines and a table.
    """
    from ..gpu import STEPS, conduct
    from ..real.gpu import available

    if unknown := [name for name in step if name not in STEPS]:
        raise InputError(f"--step {unknown[0]}: the steps are {', '.join(STEPS)}")
    if not minutes > 0:
        raise InputError(f"--minutes {minutes}: it must be positive")
    if not dry and (why := available()):
        if json:
            print_json({"ok": True, "gpu": False, "why": why, "steps": []})
        else:
            out.print(f"no GPU: nothing was run ({why})", soft_wrap=True, markup=False)
        return 0
    output.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for outcome in conduct(step or tuple(STEPS), output, dry, minutes, vllm_path):
        outcomes.append(outcome)
        if not json:
            report.outcome(out, outcome)
    good = all(o.status != "failed" for o in outcomes)
    whole = {"ok": good, "gpu": not dry, "steps": outcomes}
    (output / "gpu.json").write_bytes(msgspec.json.format(msgspec.json.encode(whole)))
    if json:
        print_json(whole)
    else:
        report.outcomes(out, outcomes)
        out.print(
            f"{'dry run: no figure is of a GPU; ' if dry else ''}all figures: {output / 'gpu.json'}", soft_wrap=True
        )
    return 0 if good else 1
