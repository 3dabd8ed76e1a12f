"""Types and floors on the package as a user gets it: a wheel, installed elsewhere, looked at from an empty folder.

On an editable install neither mypy nor import-linter sees ``rlsched.sim`` and ``rlsched.real``; and
a wheel that lacks a package fails here.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        empty = Path(folder, "empty")
        empty.mkdir()
        source = Path(folder, "source")
        # setuptools builds in the tree; a copy keeps this one clean.
        subprocess.run(["git", "-C", ROOT, "checkout-index", "-a", "-f", f"--prefix={source}/"], check=True)
        quiet = ["--quiet", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([sys.executable, "-m", "pip", "install", *quiet, "--target", site, source], check=True)
        tool = Path(sys.executable).parent
        environment = {**os.environ, "PYTHONPATH": str(site), "MYPYPATH": str(site)}
        mypy = [tool / "mypy", "--strict", "--config-file", ROOT / "pyproject.toml", "-p", "rlsched"]
        lint = [tool / "lint-imports", ROOT / ".importlinter", "--no-cache", "--no-logo"]
        results = [subprocess.run(c, cwd=empty, env=environment, check=False).returncode for c in (mypy, lint)]
    return max(results)


if __name__ == "__main__":
    sys.exit(main())
