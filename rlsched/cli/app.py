"""The application, its consoles, and the parameters that several commands share."""

import sys
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from cyclopts import App, Parameter
from rich.console import Console


class Pipe(Console):
    """A console whose reader may leave early."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


app = App(
    name="rlsched",
    help="Scheduling policies for RL post-training: simulate them, run them on real engines, check and compare.",
    help_on_error=False,
    version_flags=["--version"],
)
out = Pipe(highlight=False, emoji=False, width=None if sys.stdout.isatty() else 120)
err = Pipe(stderr=True, highlight=False, emoji=False)

Settings = Annotated[tuple[str, ...], Parameter(name="--set", negative=())]
Changes = Annotated[tuple[str, ...], Parameter(name="--with", negative=())]
Engine = Literal["transformers", "vllm", "vllm-async", "vllm-server", "sglang"]
Policies = Annotated[list[str], Parameter(consume_multiple=True)]
Scales = Annotated[tuple[str, ...], Parameter(name="--scale-cost", negative=())]
Quick = Annotated[bool, Parameter(name="--quick", negative=())]
Json = Annotated[bool, Parameter(name="--json", negative=())]
Files = Annotated[list[Path], Parameter(consume_multiple=True)]
Output = Annotated[Path | None, Parameter(name=["--output", "-o"])]
Folder = Annotated[Path, Parameter(name=["--output", "-o"])]


def print_json(value: object) -> None:
    """One JSON value on one line, for machines."""
    sys.stdout.write(msgspec.json.encode(value).decode() + "\n")
