"""The GPU check: dry on a CPU here, step by step; what of the CUDA paths is pure; and what needs a GPU says so."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import nn

from rlsched.checker import check
from rlsched.errors import InputError
from rlsched.gpu import STEPS, apart, conduct, missing, paced, plan
from rlsched.gpu import main as step
from rlsched.history import Reader
from rlsched.labels import Labeller
from rlsched.manifest import manifest
from rlsched.naming import parse
from rlsched.real import cuda
from rlsched.real.commands import Piece
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.devices import backend, full, kind, labels, nth
from rlsched.real.digest import digest, fingerprint
from rlsched.real.engines.packed import packed
from rlsched.real.engines.residence import OwnMemory, Residence
from rlsched.real.gpu import demand
from rlsched.real.installs import engine as installed
from rlsched.real.memory import Parked, held, host_copy, resident
from rlsched.real.model import QWEN3_06B, shaped
from rlsched.real.probe import Costs
from rlsched.real.setup import Setup
from rlsched.real.weights import MAGIC, Group, Staging, WeightSet, read_handle, write_handle
from rlsched.real.wire import Refused
from rlsched.replay import replay
from rlsched.shape import Shape

pytestmark = pytest.mark.real

GPU = torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(not GPU, reason="no GPU here: this path has never been run")
DRY = ("device", "ipc", "push", "sleep", "costs", "presets", "prediction", "canary")


# ---------------------------------------------------------------- the check


def rlsched(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rlsched", "gpu", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )


def test_without_a_gpu_it_says_so_and_exits_0(tmp_path: Path) -> None:
    ran = rlsched("--output", str(tmp_path / "out"), CUDA_VISIBLE_DEVICES="")
    assert ran.returncode == 0
    assert ran.stdout.startswith("no GPU: nothing was run (torch ")
    assert ran.stderr == ""
    assert not (tmp_path / "out").exists()
    told = json.loads(rlsched("--json", CUDA_VISIBLE_DEVICES="").stdout)
    assert told["ok"] and not told["gpu"] and told["steps"] == []


@pytest.mark.timeout(1500)
def test_a_dry_run_passes_every_step_and_writes_histories(tmp_path: Path) -> None:
    ran = rlsched("--dry", "--minutes", "20", "--output", str(tmp_path), *(f"--step={name}" for name in DRY))
    assert ran.returncode == 0, ran.stdout
    told = json.loads((tmp_path / "gpu.json").read_text())
    assert not told["gpu"]
    assert [(s["step"], s["status"]) for s in told["steps"]] == [(name, "passed") for name in DRY]
    seen: dict[str, Any] = {s["step"]: s["seen"] for s in told["steps"]}
    assert seen["device"]["device"] == "cpu"
    assert seen["ipc"]["same memory"]
    assert seen["push"]["buckets"] == 2
    assert seen["sleep"]["level 2: MB freed"] >= 79
    assert seen["sleep"]["offload: MB moved"] == 0  # on a CPU both places are one
    assert seen["prediction"]["judged"] is False
    assert "dry run: no figure is of a GPU" in ran.stdout
    histories = [
        *tmp_path.glob("real-*.jsonl.zst"),
        *tmp_path.glob("sim-*.jsonl.zst"),
        *tmp_path.glob("canary-*.jsonl"),
    ]
    histories = [path for path in histories if ".rollouts." not in path.name]
    assert {path.name.split("-")[0] for path in histories} == {"real", "sim", "canary"}
    for path in histories:
        report = check(Reader(path))
        assert report.ok, (path, report.violations[:2])
        assert not report.open
        assert replay(Reader(path)).divergence is None
    names = {Reader(p).manifest.labels["ipc"] for p in histories if not p.name.startswith("sim")}
    assert names == {"shared memory"}


def test_a_failed_step_stops_no_other(tmp_path: Path) -> None:
    first, second = conduct(["prediction", "device"], tmp_path, True, 10.0)
    assert (first.status, first.why) == ("failed", "Unmet: the presets left no verdict")
    assert second.status == "passed"


def test_a_failed_step_tells_what_it_saw(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run(plan: Any, folder: Path) -> Any:
        demand(False, "too little", {"MB freed": 3})

    monkeypatch.setitem(STEPS, "sleep", replace(STEPS["sleep"], run=run))
    step("sleep", "/tmp", "dry")
    told = json.loads(capsys.readouterr().out)
    assert (told["status"], told["why"], told["seen"]) == ("failed", "Unmet: too little", {"MB freed": 3})


def test_a_step_is_killed_at_its_limit_and_nothing_runs_past_the_deadline(tmp_path: Path) -> None:
    late = apart("device", tmp_path, True, 0.05, os.environ)
    assert late.status == "failed"
    assert late.why.startswith("not done within 0.05 s (log: ")
    (over,) = conduct(["device"], tmp_path, True, 1e-3)
    assert (over.status, over.why) == ("failed", "not run: the 0.001 minutes are over")


def test_a_step_that_dies_without_a_word_has_failed(tmp_path: Path) -> None:
    dead = apart("device", tmp_path, True, 60.0, {"PYTHONHOME": "/nowhere"})
    assert dead.status == "failed"
    assert dead.why.startswith("its process ended with 1 (log: ")


def test_steps_that_need_vllm_are_skipped_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLSCHED_VLLM_PYTHON", "/nowhere/python")
    assert "RLSCHED_VLLM_PYTHON" in missing(STEPS["vllm-push"], True)
    assert missing(STEPS["vllm-ipc"], True) == "CUDA IPC only"
    assert missing(STEPS["push"], True) == ""
    ran = rlsched("--dry", "--output", str(tmp_path), "--step=vllm-push", "--json")
    assert ran.returncode == 0
    assert json.loads(ran.stdout)["steps"][0]["status"] == "skipped"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--step=nap"], "--step nap: the steps are device, ipc"),
        (["--minutes=0"], "--minutes 0.0: it must be positive"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], said: str) -> None:
    ran = rlsched(*arguments)
    assert ran.returncode == 2
    assert said in ran.stderr
    assert ran.stderr.count("\n") == 1


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_dry_run_of_the_rest(tmp_path: Path) -> None:
    for outcome in conduct(["canary-bf16", "unpaced"], tmp_path, True, 25.0):
        assert outcome.status == "passed", outcome.why


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not installed("vllm").ok, reason="vLLM is not installed: make engines")
def test_a_dry_run_on_vllm(tmp_path: Path) -> None:
    for outcome in conduct(["vllm-push", "vllm-sleep"], tmp_path, True, 25.0):
        assert outcome.status == "passed", outcome.why
        assert outcome.seen["engine"].startswith("vllm ")


@needs_gpu
@pytest.mark.timeout(600)
def test_the_check_passes_on_a_gpu(tmp_path: Path) -> None:
    ran = rlsched("--output", str(tmp_path))
    assert ran.returncode == 0, ran.stdout


# ---------------------------------------------------------------- plans


def test_the_shape_is_qwen3s_of_0_6_billion() -> None:
    with torch.device("meta"):
        model = shaped(QWEN3_06B)
    weights = WeightSet(model)
    assert sum(p.numel() for p in weights.parameters.values()) == QWEN3_06B.parameters() == 596_049_920
    assert "lm_head.weight" not in weights.parameters  # tied
    assert weights.nbytes == 2 * 596_049_920
    buckets = weights.buckets(1 << 26)
    assert len(buckets) == 18
    assert sum(piece.count for pieces in buckets for piece in pieces) == 596_049_920


def test_the_full_plan_shares_one_gpu() -> None:
    full, dry = plan(False), plan(True)
    assert full.job.engine.device == full.job.trainer.device == "cuda"
    assert full.job.engine.model.parameters() == 596_049_920
    assert full.repeats == 3
    assert full.weights.engine.temperature == dry.weights.engine.temperature == 0
    assert dry.device == dry.job.engine.device == "cpu"


def test_minima_are_twice_what_was_measured() -> None:
    found = Costs(
        *(0.03, 0.001, 0.0, 1e-4, {"old_logprob": (0.1, 0.0), "update": (0.2, 1e-4)}),
        *({"ipc": 0.01}, {"ipc": 0.02, "broadcast": 0.07}, 0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.1, 0.3, 0.4, 0.0),
    )
    setup = paced(Setup(shape=Shape(b=2, samples=2, budget=46)), found)
    engine, trainer = setup.engine.pace, setup.trainer.pace
    assert engine is not None and trainer is not None
    assert engine.step.a == 68_000_000  # (30 + 4 requests of 1 ms) twice
    assert engine.step.p == 200_000
    assert (engine.bucket.fixed, engine.sleep.fixed, engine.wake.fixed) == (140_000_000, 1_000_000_000, 600_000_000)
    assert trainer.update.fixed == 440_000_000  # 0.2 s and 200 tokens of 0.1 ms, twice
    assert (trainer.shift.fixed, trainer.ref.fixed) == (800_000_000, 0)


# ---------------------------------------------------------------- devices and labels


def test_nccl_needs_a_gpu_for_each_process() -> None:
    assert backend(["cuda:a", "cuda:b", "cuda:c"]) == "nccl"
    assert backend(["cuda:a", "cuda:a"]) == "gloo"
    assert backend(["cuda:a", "cpu"]) == "gloo"
    assert backend(["cpu", "cpu"]) == "gloo"
    assert (kind("cuda:1"), full("cuda"), full("cuda:1"), full("cpu")) == ("cuda", "cuda:0", "cuda:1", "cpu")


@pytest.mark.parametrize(
    ("engine", "trainer", "places", "said"),
    [
        ("cpu", "cpu", 2, ("cores", "shared memory", "gloo")),
        ("cuda", "cuda:0", 2, ("one GPU, shared", "CUDA IPC", "gloo")),
        ("cuda", "cuda", 1, ("GPU", "CUDA IPC", "gloo")),
        ("cuda:1", "cuda", 2, ("GPU", "CUDA IPC", "nccl")),
        ("cuda:1", "cuda", 4, ("GPU", "CUDA IPC", "nccl")),
        ("cuda", "cuda:1", 3, ("GPUs, shared", "CUDA IPC", "gloo")),
    ],
)
def test_labels_say_what_was_there(engine: str, trainer: str, places: int, said: tuple[str, str, str]) -> None:
    found = labels(engine, trainer, max(1, places - 1), places)
    assert (found["device"], found["ipc"], found["broadcast"]) == said


def test_engines_take_the_gpus_from_the_one_named_on() -> None:
    assert [nth("cuda:1", e) for e in range(3)] == ["cuda:1", "cuda:2", "cuda:3"]
    assert [nth("cuda", 2), nth("cpu", 2)] == ["cuda", "cpu"]


def test_a_shared_gpu_is_never_called_two() -> None:
    policy = parse("areal-async,admit.eta=1")
    head = manifest("real", policy, Shape(), 0, labels=labels("cuda", "cuda", 1, 2))
    assert Labeller(head)._placement == "separate processes on one GPU, shared"
    head = manifest("real", policy, Shape(engines=2), 0, labels=labels("cuda", "cuda:1", 2, 3))
    assert Labeller(head)._placement == "separate processes on shared GPUs"


def test_engine_and_trainer_are_on_devices_of_one_kind() -> None:
    with pytest.raises(InputError, match=r"engine\.device is cpu and trainer\.device cuda"):
        Setup(engine=EngineConfig(), trainer=TrainerConfig(device="cuda"))


# ---------------------------------------------------------------- staging


def test_a_staging_file_carries_a_handle_or_the_bytes(tmp_path: Path) -> None:
    path = tmp_path / "staging"
    path.write_bytes(bytes(4096))
    file = os.open(path, os.O_RDWR)
    try:
        assert read_handle(file) == b""
        write_handle(file, b"handle")
        assert read_handle(file) == b"handle"
        os.ftruncate(file, len(MAGIC))
        with pytest.raises(ValueError, match="too small for a CUDA IPC handle"):
            write_handle(file, b"handle")
    finally:
        os.close(file)


def test_an_engine_opens_what_the_file_says_and_again_only_when_that_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The CUDA calls stand in for: a handle names a tensor of this process."""
    exports: dict[bytes, torch.Tensor] = {}
    opened: list[bytes] = []

    def export(buffer: torch.Tensor) -> bytes:
        handle = f"handle {len(exports)}".encode()
        exports[handle] = buffer
        return handle

    def open_(handle: bytes) -> torch.Tensor:
        opened.append(handle)
        return exports[handle]

    monkeypatch.setattr(cuda, "exported", export)
    monkeypatch.setattr(cuda, "opened", open_)
    monkeypatch.setattr(cuda, "on_gpu", lambda device: device == "gpu")
    monkeypatch.setattr(torch, "empty", lambda *size, device=None, **more: torch.zeros(*size, **more))
    one, two = tmp_path / "one", tmp_path / "two"
    for path in (one, two):
        path.write_bytes(bytes(4096))
    trainer, engine = Staging("gpu"), Staging()

    def passes(path: Path, value: int) -> bool:
        trainer.at(str(path), 4096).fill_(value)
        return bool((engine.at(str(path), 4096) == value).all())

    assert passes(one, 1)
    assert passes(one, 2)
    assert opened == [b"handle 0"]
    assert passes(two, 3)
    trainer.at(str(one), 4096).fill_(4)  # of this push the engine is no part
    assert passes(one, 5)
    assert opened == [b"handle 0", b"handle 1", b"handle 2"]
    assert engine.handle == trainer.handle == b"handle 2"


@pytest.mark.parametrize(
    ("devices", "wanted"),
    [(["cuda:a", "cuda:b"], "nccl"), (["cuda:a", "cuda:a"], "gloo"), (["cuda:a", "cpu"], "gloo")],
)
def test_a_group_finds_out_when_it_meets_what_carries_it(
    devices: list[str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices by name only: what NCCL would do is not tried."""
    monkeypatch.setattr(cuda, "on_gpu", lambda device: device.startswith("cuda"))
    monkeypatch.setattr(cuda, "identity", lambda device: device)
    monkeypatch.setattr(cuda, "nccl", lambda store, rank, size, timeout: f"NCCL {rank} of {size}")
    groups = [Group(device) for device in devices]
    address = groups[0].host()
    with ThreadPoolExecutor() as pool:
        joined = [pool.submit(group.join, address, rank, 2, 20.0) for rank, group in enumerate(groups)]
    assert [future.result() for future in joined] == [None, None]
    if wanted == "nccl":
        assert [(g._group, g._staged) for g in groups] == [("NCCL 0 of 2", "cuda:a"), ("NCCL 1 of 2", "cuda:b")]
    else:
        assert all(isinstance(g._group, torch.distributed.ProcessGroupGloo) for g in groups)
        assert all(g._staged == "cpu" for g in groups)
    for group in groups:
        group.leave()


# ---------------------------------------------------------------- digests


@given(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=2, max_size=50), st.data())
def test_a_fingerprint_sees_every_bit_and_its_place(values: list[int], data: st.DataObject) -> None:
    tensor = torch.tensor(values, dtype=torch.int32)
    told = int(fingerprint(tensor))
    at = data.draw(st.integers(0, len(values) - 1))
    other = tensor.clone()
    other[at] ^= 1 << data.draw(st.integers(0, 30))
    assert int(fingerprint(other)) != told
    assert int(fingerprint(~tensor)) != told
    swapped = tensor.clone()
    swapped[[0, at]] = tensor[[at, 0]]
    assert (int(fingerprint(swapped)) == told) == torch.equal(swapped, tensor)


def test_a_fingerprint_is_of_bits_not_of_values() -> None:
    zeros = torch.tensor([0.0, -0.0])
    assert int(fingerprint(zeros)) != int(fingerprint(zeros.abs()))
    nan = torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16)
    assert int(fingerprint(nan)) == int(fingerprint(nan.clone()))
    assert int(fingerprint(torch.tensor([], dtype=torch.float64))) == 0


def test_a_fingerprint_does_not_depend_on_how_it_is_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    told = int(fingerprint(tensor))
    monkeypatch.setattr("rlsched.real.digest.CHUNK", 7)
    assert int(fingerprint(tensor)) == told


def test_a_gpus_digest_names_its_parameters() -> None:
    one, other = torch.arange(4.0), torch.arange(5.0)
    assert digest({"a": one, "b": other}, on_gpu=True) == digest({"a": one.clone(), "b": other}, on_gpu=True)
    assert digest({"a": one, "b": other}, on_gpu=True) != digest({"a": one, "c": other}, on_gpu=True)
    assert digest({"a": one}, on_gpu=True) != digest({"a": one})


# ---------------------------------------------------------------- memory


def test_parked_tensors_come_back_as_they_were() -> None:
    tensors = [torch.randn(100), nn.Parameter(torch.randn(3, 5).to(torch.bfloat16))]
    before = [t.detach().clone() for t in tensors]
    parked = Parked(tensors)
    assert not parked.parked
    parked.drop()
    assert parked.parked
    assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
    parked.take()
    assert not parked.parked
    assert all(torch.equal(t, b) for t, b in zip(tensors, before, strict=True))


def test_a_host_copy_shares_no_memory() -> None:
    tensor = torch.ones(4)
    copy = host_copy(tensor)
    tensor.zero_()
    assert copy.tolist() == [1.0] * 4
    assert abs(held("cpu") - resident()) < 1 << 28


class Shelf:
    """A memory that notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[str, ...]]] = []

    def drop(self, parts: Any) -> None:
        self.told.append(("drop", tuple(parts)))

    def take(self, parts: Any) -> None:
        self.told.append(("take", tuple(parts)))

    def forget_kv(self) -> None:
        pass


def test_weights_that_level_1_parks_are_asleep_and_not_lost() -> None:
    shelf = Shelf()
    residence = Residence(WeightSet(nn.Linear(2, 2)), shelf, (1, 2), parks=True)
    residence.sleep(1)
    assert residence.asleep == {"kv", "weights"}
    assert residence.checksum() == ""
    with pytest.raises(Refused, match="asleep"):
        residence.begin_update(1)
    residence.wake(["weights"])
    residence.wake(["kv"])
    residence.require_usable()  # no update was needed
    assert shelf.told == [("drop", ("kv",)), ("take", ("weights",)), ("take", ("kv",))]
    residence.sleep(2)
    residence.wake(["weights", "kv"])
    with pytest.raises(Refused, match="not whole"):
        residence.require_usable()


class Cache:
    """What an engine's memory needs of a KV cache."""

    def __init__(self) -> None:
        self.cache_tensor = torch.ones(8)
        self.resets = 0

    def reset(self) -> None:
        self.resets += 1


def test_on_a_gpu_level_1_moves_the_weights_and_level_2_loses_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are on the CPU; that they leave a GPU isn't tried."""
    monkeypatch.setattr(cuda, "on_gpu", lambda _: True)
    monkeypatch.setattr(cuda, "settle", lambda _: None)
    model, cache = nn.Linear(2, 3), Cache()
    before = [p.detach().clone() for p in model.parameters()]
    memory = OwnMemory(WeightSet(model), cache)

    def gone() -> bool:
        return all(p.untyped_storage().nbytes() == 0 for p in model.parameters())

    memory.drop(("kv",))
    assert gone() and cache.cache_tensor.untyped_storage().nbytes() == 0
    memory.take(("weights",))
    assert all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
    memory.take(("kv",))
    assert cache.resets == 1
    memory.drop(("kv", "weights"))
    memory.take(("kv", "weights"))
    assert not any(p.any() for p in model.parameters())


# ---------------------------------------------------------------- vLLM's packed buffer


def test_a_bucket_of_whole_parameters_is_vllms_packed_buffer() -> None:
    weights = WeightSet(nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2)).to(torch.bfloat16))
    (pieces,) = weights.buckets(1 << 20)
    told = packed(pieces, weights.parameters)
    assert told["names"] == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert told["shapes"] == [[5], [5, 3], [2], [2, 5]]
    assert told["tensor_sizes"] == [10, 30, 4, 20]
    assert set(told["dtype_names"]) == {"bfloat16"}


@pytest.mark.parametrize("piece", [Piece("weight", 1, 5, 0), Piece("weight", 0, 5, 0), Piece("weight", 0, 6, 4)])
def test_a_bucket_that_splits_or_pads_a_parameter_is_not(piece: Piece) -> None:
    with pytest.raises(Refused, match="doesn't lie whole in this bucket"):
        packed([piece], dict(nn.Linear(2, 3).named_parameters()))


# ---------------------------------------------------------------- on a GPU


@needs_gpu
def test_a_gpus_fingerprint_is_the_cpus() -> None:
    tensor = torch.randn(100_003, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert int(fingerprint(tensor.cuda())) == int(fingerprint(tensor))


@needs_gpu
def test_version_0_is_the_same_in_every_process_of_a_gpu(rig: Any) -> None:
    model = replace(QWEN3_06B, layers=2)
    engine = rig.engine("gpu-engine", EngineConfig(model=model, device="cuda", kv_blocks=64))
    trainer = rig.trainer("gpu-trainer", TrainerConfig(model=model, device="cuda"))
    assert engine.initial_checksum == trainer.initial_checksum
