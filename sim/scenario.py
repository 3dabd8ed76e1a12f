"""A scenario: everything that a simulated run needs besides its policy, from one TOML file.

Seconds and bytes are what a person measures; ``sim`` turns them into integer picoseconds once.
"""

from collections.abc import Iterable
from pathlib import Path

from msgspec import Struct

from rlsched import settings
from rlsched.commands import Transport
from rlsched.errors import InputError
from rlsched.shape import Shape
from rlsched.workload import Length, Workload

GB = 10**9


class EngineCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine: a step takes ``step + seq·decoding + kv·kv_tokens + prompt·prompt_tokens`` seconds."""

    step_s: float = 8e-3
    """Seconds of a step, whatever is in it: reading the weights once."""
    seq_s: float = 2e-5
    """Seconds a request that decodes."""
    kv_s: float = 2e-8
    """Seconds a token in KV: what attention reads."""
    prompt_s: float = 2e-5
    """Seconds a prompt token computed."""
    kv_blocks: int = 16384
    """KV blocks (vLLM: ``num_gpu_blocks``)."""
    block_size: int = 16
    """Tokens a block (vLLM: ``block_size``, 16)."""
    max_num_seqs: int = 256
    """Most requests running at once (vLLM: ``max_num_seqs``, 256)."""
    max_batch_tokens: int = 8192
    """Token budget of a step (vLLM: ``max_num_batched_tokens``, 8192 in verl)."""


class TrainerCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """The trainer: each phase takes ``_s + _token_s · tokens``, prompt tokens included."""

    old_logprob_s: float = 0.0
    """Seconds of the old-logprob phase, whatever the batch; 0 with a token cost of 0 leaves the phase out."""
    old_logprob_token_s: float = 4e-6
    """Seconds a token of the old-logprob phase."""
    ref_s: float = 0.0
    """Seconds of the reference phase."""
    ref_token_s: float = 0.0
    """Seconds a token of the reference phase."""
    update_s: float = 0.0
    """Seconds of an optimizer step, besides its tokens."""
    update_token_s: float = 1.2e-5
    """Seconds a token of the update phase."""
    optimizer_steps: int = 1
    """Optimizer steps a batch (verl: ``train_batch_size / ppo_mini_batch_size · ppo_epochs``)."""
    reference_devices: int = 0
    """Devices on which the costs were measured; they scale with their number. 0: they don't scale."""
    parameters_gb: float = 15.2
    """Parameters on the trainer's devices, all together, in 10⁹ bytes."""
    optimizer_gb: float = 91.4
    """Optimizer state on the trainer's devices, all together, in 10⁹ bytes."""


class TransportCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """Weights on their way: buckets, one after the other, each acknowledged before the next."""

    version_gb: float = 15.2
    """Bytes of one version of the weights, in 10⁹."""
    ipc_begin_s: float = 0.0
    """Seconds of an IPC transfer besides its buckets: gathering, loading, checking."""
    ipc_bucket_s: float = 2e-3
    """Seconds of an IPC bucket besides its bytes: packing, signalling, acknowledgement."""
    ipc_gbps: float = 100.0
    """10⁹ bytes a second through CUDA IPC or shared memory."""
    broadcast_begin_s: float = 0.0
    """Seconds of a broadcast besides its buckets."""
    broadcast_bucket_s: float = 2e-3
    """Seconds of a broadcast bucket besides its bytes."""
    broadcast_gbps: float = 8.25
    """10⁹ bytes a second through a broadcast, to all engines at once."""
    disk_begin_s: float = 0.0
    """Seconds of a transfer through a checkpoint on disk, besides its bytes and buckets."""
    disk_bucket_s: float = 2e-3
    """Seconds of a bucket read from disk besides its bytes."""
    disk_gbps: float = 2.0
    """10⁹ bytes a second to disk, where a version is written once, and from disk, where each engine reads it."""

    def begin_s(self, transport: Transport) -> float:
        """Seconds of a transfer besides its buckets; through disk, the writing of the version included."""
        if transport == "ipc":
            return self.ipc_begin_s
        if transport == "disk":
            return self.disk_begin_s + self.version_gb / self.disk_gbps
        return self.broadcast_begin_s

    def bucket_s(self, transport: Transport, size: int) -> float:
        """Seconds of a bucket of ``size`` bytes."""
        if transport == "ipc":
            return self.ipc_bucket_s + size / GB / self.ipc_gbps
        if transport == "disk":
            return self.disk_bucket_s + size / GB / self.disk_gbps
        return self.broadcast_bucket_s + size / GB / self.broadcast_gbps


class MemoryCosts(Struct, frozen=True, forbid_unknown_fields=True):
    """Memory of one device, and the time it takes to change hands."""

    device_gb: float = 0.0
    """Capacity of a device in 10⁹ bytes; 0: not checked."""
    kv_gb: float = 20.0
    """KV cache of an engine in 10⁹ bytes."""
    offload_gbps: float = 25.0
    """10⁹ bytes a second between a device and its host, for trainer parts and level-1 sleep."""
    shift_s: float = 0.0
    """Seconds that loading or offloading a trainer part takes, besides its bytes."""
    sleep_s: float = 0.2
    """Seconds to fall asleep, besides bytes."""
    wake_weights_s: float = 0.1
    """Seconds to allocate the weights again."""
    wake_kv_s: float = 0.1
    """Seconds to allocate the KV cache again."""


class Control(Struct, frozen=True, forbid_unknown_fields=True):
    """Control of engines."""

    latency_s: float = 1e-3
    """Seconds from a command to its effect: the way through RPC. At least a nanosecond."""
    submit_s: float = 0.0
    """Seconds more for a request: until the engine's loop can see it."""
    abort_s: float = 0.0
    """Seconds from an abort's effect to its answer."""
    pause_s: float = 0.0
    """Seconds from a pause's effect to its answer."""
    resume_s: float = 0.0
    """Seconds from a resume's effect to its answer."""
    flush_s: float = 0.0
    """Seconds that a flush takes."""


class Crash(Struct, frozen=True, forbid_unknown_fields=True):
    """An engine is gone, with everything inside it, and comes back empty."""

    engine: int
    """Which engine."""
    at_s: float
    """Seconds from the run's start; what is to happen at the very instant happens in the seed's order."""
    down_s: float
    """Seconds until it is up again."""


class Faults(Struct, frozen=True, forbid_unknown_fields=True):
    """What goes wrong."""

    crashes: tuple[Crash, ...] = ()
    """Crashes of engines."""
    repeat: float = 0.0
    """Share of segments, scores and answers that are told a second time, 0 … 1."""
    repeat_s: float = 0.0
    """Seconds until they are."""


class Scenario(Struct, frozen=True, forbid_unknown_fields=True):
    """A simulated run but for its policy."""

    shape: Shape = Shape(b=32, samples=8, engines=4, budget=2048)
    workload: Workload = Workload(output=Length(kind="lognormal", mean=500.0))
    engine: EngineCosts = EngineCosts()
    trainer: TrainerCosts = TrainerCosts()
    transport: TransportCosts = TransportCosts()
    memory: MemoryCosts = MemoryCosts()
    control: Control = Control()
    faults: Faults = Faults()

    def __post_init__(self) -> None:
        for table in ("engine", "trainer", "transport", "memory", "control"):
            costs = getattr(self, table)
            for name in costs.__struct_fields__:
                if getattr(costs, name) < 0:
                    raise InputError(f"{table}.{name} is {getattr(costs, name)}: it can't be negative")
        engine = self.engine
        for name in ("kv_blocks", "block_size", "max_num_seqs", "max_batch_tokens"):
            if getattr(engine, name) < 1:
                raise InputError(f"engine.{name} is {getattr(engine, name)}: it must be at least 1")
        for name in ("ipc_gbps", "broadcast_gbps", "disk_gbps"):
            if getattr(self.transport, name) <= 0:
                raise InputError(f"transport.{name} is {getattr(self.transport, name)}: it must be positive")
        if self.memory.offload_gbps <= 0:
            raise InputError(f"memory.offload_gbps is {self.memory.offload_gbps}: it must be positive")
        if not 0 <= self.faults.repeat <= 1 or self.faults.repeat_s < 0:
            raise InputError("faults.repeat must be within 0 … 1 and faults.repeat_s at least 0")
        for crash in self.faults.crashes:
            if crash.at_s < 0 or crash.down_s <= 0:
                raise InputError(f"faults.crashes: {crash}: at_s must be at least 0 and down_s positive")
        if engine.step_s <= 0:
            raise InputError(f"engine.step_s is {engine.step_s}: a step takes time")
        prompt, new = self.workload.longest(self.shape.budget)
        room = engine.kv_blocks * engine.block_size
        if prompt + new > room:
            raise InputError(
                f"a prompt of {prompt} and {new} new tokens can never fit into engine.kv_blocks {engine.kv_blocks} of"
                f" {engine.block_size} tokens ({room}): raise kv_blocks, or lower shape.budget or workload.prompt"
            )


def load(path: Path | str | None, changes: Iterable[str] = ()) -> Scenario:
    """The scenario of a TOML file (None: the default), with ``table.field=value`` changes on top.

    Raises InputError that names the file and the field.
    """
    return settings.load(Scenario(), path, changes)
