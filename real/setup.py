"""The job of a real run: what is generated and trained, on which model, held to which minima."""

import re
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from rlsched import settings
from rlsched.errors import InputError
from rlsched.shape import Shape
from rlsched.workload import Length, Workload

from .config import EngineConfig, TrainerConfig
from .devices import kind
from .installs import EngineKind
from .limits import Limits
from .pacing import EnginePace, StepCost, TrainerPace, WorkCost
from .task import Task

MS = 1_000_000

ENGINE_PACE = EnginePace(
    step=StepCost(a=14 * MS, b=200_000, c=300, p=30_000),
    bucket=WorkCost(fixed=60 * MS),
    sleep=WorkCost(fixed=60 * MS),
    wake=WorkCost(fixed=60 * MS),
)
LOADING_PACE = replace(ENGINE_PACE, install=WorkCost(fixed=60 * MS))
"""Of engines with weights of their own, into which a version that has come is loaded: vLLM in process took 9 to 11 ms
for it, SGLang 8 to 20. Steps are the same: vLLM's took 2.1 ms of CPU (median) to 8.2 (most of 730)."""
TRAINER_PACE = TrainerPace(
    old_logprob=WorkCost(fixed=80 * MS, each=150_000),
    update=WorkCost(fixed=250 * MS, each=450_000),
    shift=WorkCost(fixed=30 * MS),
)


class Setup(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that a real run needs besides its policy. The default is the job of the demo."""

    shape: Shape = Shape(b=4, samples=4, steps=6, budget=96)
    workload: Workload = Workload(prompt=Length(mean=4.0), output=Length(kind="lognormal", mean=40.0))
    task: Task = Task()
    engine_kind: EngineKind = "transformers"
    """Which library generates; see ``installs`` for where it must be."""
    interpreter: str = ""
    """The Python that has this library; empty: where ``installs`` looks."""
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    limits: Limits = Limits()
    """How long a process may keep silent before it is taken for dead."""
    overlap: bool = False
    """Of a broadcast, pack the next bucket while one is on its way."""
    forced: bool = True
    """Lengths are the workload's and end-of-sequence is ignored: for comparison. False: rollouts stop by themselves."""

    def __post_init__(self) -> None:
        for where, device in (("engine", self.engine.device), ("trainer", self.trainer.device)):
            if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
                raise InputError(f"{where}.device is {device!r}: it must be cpu, cuda or cuda:N")
        if kind(self.engine.device) != kind(self.trainer.device):
            raise InputError(
                f"engine.device is {self.engine.device} and trainer.device {self.trainer.device}: weights travel only"
                " between devices of one kind, so name two GPUs, one GPU twice, or cpu twice"
            )
        prompt = self.task.prompt_symbols + 1
        room = self.engine.kv_blocks * self.engine.page_size
        if prompt + self.shape.budget > room:
            raise InputError(
                f"a prompt of {prompt} and {self.shape.budget} new tokens can never fit into"
                f" engine.kv_blocks {self.engine.kv_blocks} of {self.engine.page_size} tokens ({room}):"
                " raise kv_blocks or lower shape.budget"
            )

    def paced(self) -> "Setup":
        """The same job with steps, phases and transfers held to the demo's minima, where none are declared."""
        minima = self.engine.pace or (ENGINE_PACE if self.engine_kind == "transformers" else LOADING_PACE)
        return replace(
            self,
            engine=replace(self.engine, pace=minima),
            trainer=replace(self.trainer, pace=self.trainer.pace or TRAINER_PACE),
        )


def load(
    path: Path | str | None,
    steps: int | None = None,
    engine: EngineKind | None = None,
    interpreter: str | None = None,
) -> Setup:
    """The setup of a TOML file (None: the default), with what else is given changed.

    Raises InputError that names the file and the field.
    """
    setup = settings.load(Setup(), path, () if steps is None else (f"shape.steps={steps}",))
    engine = setup.engine_kind if engine is None else engine
    return replace(setup, engine_kind=engine, interpreter=setup.interpreter if interpreter is None else interpreter)
