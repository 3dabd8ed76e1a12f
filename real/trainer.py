"""The trainer, as a child process: a torch model, Adam, and one policy-gradient step after another.

One thread carries out commands in the order in which they came, so that a bucket asked for during a training call is
packed after it; the version named in the request tells whether that is still the version meant.

Run as `python -m rlsched.real.trainer --fd N --parent PID`.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from torch import Tensor

from . import answers, commands, cuda, wire
from .child import adopt
from .config import TrainerConfig
from .loss import clipped_loss, group_advantages, reference_penalty, token_logprobs
from .memory import host_copy, resident, trim
from .model import build, fill
from .pacing import Pacer, TrainerPace, WorkCost
from .weights import Group, Staging, WeightSet

PARTS = ("parameters", "optimizer")


class Batch(NamedTuple):
    """Samples as tensors: N rollouts, right-padded to T + 1 tokens; column t is about predicting token t + 1."""

    ids: Tensor  # [N, T + 1]
    present: Tensor  # [N, T + 1], 1 where there is a token
    engine: Tensor  # [N, T], the engine's logprobs of outputs, 0 elsewhere
    mask: Tensor  # [N, T], 1 at outputs that count
    advantages: Tensor  # [N]

    def rows(self, chosen: list[int]) -> Batch:
        """Some of the rollouts."""
        return Batch(*(field[chosen] for field in self))


def collate(samples: Sequence[commands.Sample], device: str) -> Batch:
    """Samples as tensors. Advantages are relative to the whole group, so do this before any split."""
    width = max(len(s.prompt) + len(s.output) for s in samples)
    ids = torch.zeros(len(samples), width, dtype=torch.long)
    present = torch.zeros(len(samples), width, dtype=torch.long)
    engine = torch.zeros(len(samples), width - 1)
    mask = torch.zeros(len(samples), width - 1)
    for row, sample in enumerate(samples):
        tokens = sample.prompt + sample.output
        ids[row, : len(tokens)] = torch.tensor(tokens)
        present[row, : len(tokens)] = 1
        outputs = slice(len(sample.prompt) - 1, len(tokens) - 1)
        engine[row, outputs] = torch.tensor(sample.logprobs)
        mask[row, outputs] = torch.tensor(sample.mask or [1] * len(sample.output), dtype=torch.float32)
    rewards = torch.tensor([s.reward for s in samples])
    advantages = group_advantages(rewards, torch.tensor([s.group for s in samples]))
    return Batch(*(t.to(device) for t in (ids, present, engine, mask, advantages)))


def minibatches(samples: Sequence[commands.Sample], count: int) -> list[list[int]]:
    """Rows of each minibatch: whole groups, in order of first appearance, spread as evenly as they go.

    Fewer than `count` minibatches if there are fewer groups.
    """
    rows: dict[int, list[int]] = {}
    for row, sample in enumerate(samples):
        rows.setdefault(sample.group, []).append(row)
    groups = list(rows.values())
    count = min(count, len(groups))
    bounds = [round(i * len(groups) / count) for i in range(count + 1)]
    return [list(chain.from_iterable(groups[low:high])) for low, high in pairwise(bounds)]


class Trainer:
    """State and commands of the trainer."""

    def __init__(self, config: TrainerConfig, port: wire.Port) -> None:
        self._config = config
        self._port = port
        self._pace = config.pace or TrainerPace()
        torch.set_num_threads(config.threads)
        cuda.choose(config.device)
        self._model = build(config.model, config.device)
        self._weights = WeightSet(self._model)
        self._reference = build(config.model, config.device) if config.ref_weight else None
        self._staging = Staging(config.device)
        self._group = Group(config.device)
        self._restart()

    def _restart(self) -> None:
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=self._config.lr)
        self._version = 0
        self._steps = 0
        self._away: set[str] = set()  # parts that were offloaded
        self._pacer = Pacer()

    def serve(self) -> None:
        """Carry out commands until the parent closes the socket."""
        while (call := self._port.receive()) is not None:
            try:
                result = self._execute(call.command)
            except wire.Refused as refusal:
                self._port.send(wire.Failure(call.id, str(refusal), refused=True))
            except Exception as error:
                traceback.print_exc()
                self._port.send(wire.Failure(call.id, f"{type(error).__name__}: {error}", refused=False))
            else:
                self._port.send(wire.Answer(call.id, result))

    def _execute(self, command: commands.Command) -> answers.Result:
        match command:
            case commands.Train(batch, version):
                return self._train(batch, version)
            case commands.Evaluate(batch):
                return self._evaluate(batch)
            case commands.LoadParts(parts):
                return self._shift(parts, away=False)
            case commands.OffloadParts(parts):
                return self._shift(parts, away=True)
            case commands.PackBucket(path, size, index, version):
                return self._pack(path, size, index, version)
            case commands.Offer(version, bucket_bytes):
                self._require(version)
                return answers.Offered(len(self._weights.buckets(bucket_bytes)), self._weights.checksum())
            case commands.SendBucket():
                return self._send(command)
            case commands.SaveCheckpoint(path, version):
                return self._save(path, version)
            case commands.HostGroup():
                return answers.Hosted(self._group.host())
            case commands.JoinGroup(address, rank, world_size, timeout_s):
                self._group.join(address, rank, world_size, timeout_s)
                return answers.Done()
            case commands.LeaveGroup():
                self._group.leave()
                return answers.Done()
            case commands.Checksum():
                return answers.Digest(self._weights.checksum(), self._version)
            case commands.Count():
                return self._count()
            case commands.Reset(seed):
                return self._reset(seed)
        raise wire.Refused(f"not a command for a trainer: {type(command).__name__}")

    # ------------------------------------------------------------ training

    def _train(self, samples: list[commands.Sample], version: int) -> answers.Trained:
        if self._away:
            raise wire.Refused(f"offloaded: {', '.join(sorted(self._away))}")
        if not samples:
            raise wire.Refused("an empty batch")
        config, pace = self._config, self._pace
        size = sum(len(s.output) for s in samples)
        batch = collate(samples, config.device)
        phase_ns: dict[str, int] = {}

        with self._phase("old_logprob", pace.old_logprob, size, phase_ns), torch.no_grad():
            own = self._logprobs(self._model, batch)
            gap = float(((own - batch.engine).abs() * batch.mask).max())
        old = own if config.ratio == "recomputed" else batch.engine

        reference: Tensor | None = None
        if self._reference is not None:
            with self._phase("ref", pace.ref, size, phase_ns), torch.no_grad():
                reference = self._logprobs(self._reference, batch)

        losses, norms, clips = [], [], []
        with self._phase("update", pace.update, size, phase_ns):
            for rows in minibatches(samples, config.minibatches):
                loss, clipped, norm = self._step(
                    batch.rows(rows), old[rows], None if reference is None else reference[rows]
                )
                losses.append(loss)
                clips.append(clipped)
                norms.append(norm)
            if config.model.weights == "canary":
                fill(self._model, config.model, version)
            self._optimizer.zero_grad()  # gradients don't stay behind when the parameters leave
            self._version = version
        return answers.Trained(
            version=version,
            optimizer_steps=self._steps,
            tokens=int(batch.mask.count_nonzero()),
            loss=sum(losses) / len(losses),
            grad_norm=max(norms),
            clip_fraction=sum(clips) / len(clips),
            reward=sum(s.reward for s in samples) / len(samples),
            max_logprob_gap=gap,
            phase_ns=phase_ns,
        )

    def _step(self, batch: Batch, old: Tensor, reference: Tensor | None) -> tuple[float, float, float]:
        config = self._config
        self._optimizer.zero_grad()
        new = self._logprobs(self._model, batch)
        policy = clipped_loss(new, old, batch.advantages, batch.mask, config.clip_low, config.clip_high)
        loss = policy.loss
        if reference is not None:
            loss = loss + config.ref_weight * reference_penalty(new, reference, batch.mask)
        loss.backward()  # type: ignore[no-untyped-call,unused-ignore]
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), config.max_grad_norm)
        self._optimizer.step()
        self._steps += 1
        return float(loss.detach()), float(policy.clip_fraction), float(norm)

    def _logprobs(self, model: Any, batch: Batch) -> Tensor:
        logits = model(input_ids=batch.ids, attention_mask=batch.present, use_cache=False).logits[:, :-1]
        return token_logprobs(logits / self._config.temperature, batch.ids[:, 1:])

    @contextmanager
    def _phase(self, name: str, cost: WorkCost, units: int, times: dict[str, int]) -> Iterator[None]:
        began = time.monotonic_ns()
        self._port.notify(answers.Phase(name, "begin", began))
        with self._held(cost.of(units)):
            yield
            cuda.settle(self._config.device)
        ended = time.monotonic_ns()
        times[name] = ended - began
        self._port.notify(answers.Phase(name, "end", ended))

    @contextmanager
    def _held(self, cost: int) -> Iterator[None]:
        self._pacer.rest()  # work that failed may have left a chain
        self._pacer.start()
        yield
        if self._config.pace is not None:
            self._pacer.hold(cost)
        self._pacer.rest()

    def _evaluate(self, samples: list[commands.Sample]) -> answers.Evaluated:
        with torch.no_grad():
            logprobs = self._logprobs(self._model, collate(samples, self._config.device))
        spans = [(len(s.prompt) - 1, len(s.prompt) + len(s.output) - 1) for s in samples]
        return answers.Evaluated([row[low:high].tolist() for row, (low, high) in zip(logprobs, spans, strict=True)])

    # ------------------------------------------------------------ weights and memory

    def _require(self, version: int) -> None:
        if version != self._version:
            raise wire.Refused(f"the weights are version {self._version}, not {version}")

    def _pack(self, path: str, size: int, index: int, version: int) -> answers.Packed:
        self._require(version)
        began = time.monotonic_ns()
        pieces = self._weights.buckets(size)[index]
        used = self._weights.pack(self._staging.at(path, size), pieces)
        return answers.Packed(pieces, used, time.monotonic_ns() - began)

    def _send(self, command: commands.SendBucket) -> answers.Moved:
        self._require(command.version)
        began = time.monotonic_ns()
        pieces, *later = self._weights.buckets(command.bucket_bytes)[command.index :]
        sent = self._group.send(self._weights, pieces, later[0] if command.ahead and later else ())
        return answers.Moved(sent, time.monotonic_ns() - began)

    def _save(self, path: str, version: int) -> answers.Moved:
        self._require(version)
        began = time.monotonic_ns()
        return answers.Moved(self._weights.save(Path(path)), time.monotonic_ns() - began)

    def _shift(self, parts: list[str], away: bool) -> answers.Shifted:
        unknown = set(parts) - set(PARTS)
        if unknown:
            raise wire.Refused(f"no such part: {', '.join(sorted(unknown))}")
        there = torch.device("cpu" if away else self._config.device)
        moved = 0
        with self._held(self._pace.shift.of(len(parts))):
            for part in parts:
                for tensor in self._tensors(part):
                    # On a CPU both places are one: the shift is recorded, and nothing moves.
                    if tensor.device.type != there.type:
                        moved += tensor.numel() * tensor.element_size()
                        tensor.data = host_copy(tensor) if away else tensor.data.to(there, non_blocking=True)
            cuda.settle(self._config.device)
            if moved:
                trim()
            self._away = self._away | set(parts) if away else self._away - set(parts)
        return answers.Shifted(parts, moved)

    def _tensors(self, part: str) -> list[Tensor]:
        if part == "parameters":
            return list(self._weights.parameters.values())
        states = self._optimizer.state.values()
        return [value for state in states for value in state.values() if isinstance(value, Tensor) and value.dim()]

    def _reset(self, seed: int) -> answers.Done:
        self._group.leave()
        if self._away:
            self._shift(sorted(self._away), away=False)
        fill(self._model, self._config.model)
        torch.manual_seed(seed)
        self._restart()
        return answers.Done()

    def _count(self) -> answers.Counted:
        pacer = self._pacer
        return answers.Counted(
            pacer.held, pacer.declared_ns, pacer.overruns, pacer.overrun_ns, time.process_time_ns(), resident()
        )

    def loaded(self) -> answers.Loaded:
        """The answer to `Load`."""
        return answers.Loaded({}, self._weights.nbytes, self._weights.checksum())


def main() -> int:
    """Serve one parent until it closes the socket; the exit code."""
    port = wire.Port(adopt())
    first = port.receive()
    if first is None or not isinstance(first.command, commands.Load):
        print("the first command must be Load", file=sys.stderr)
        return 2
    trainer = Trainer(msgspec.convert(first.command.config, TrainerConfig), port)
    port.send(wire.Answer(first.id, trainer.loaded()))
    trainer.serve()
    return 0


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)
