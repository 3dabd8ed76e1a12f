"""What vLLM's worker can do besides, by vLLM's `worker_extension_cls`: take the child's weights, and give them back.

vLLM fuses some parameters, pads others, and on a CPU it packs the matrices of its linear layers and lets go of them.
So the weights that it computes with are read back as the layers answer: the product of a packed matrix with unit
vectors is the matrix, bit for bit, for every other term of each sum is zero. (Only a zero's sign is lost.) On a GPU
nothing is packed and the weights are read as they are; that has not been run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import torch
import vllm
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.platforms import current_platform

from ..commands import Json
from ..weights import Staging
from .vllm_landing import Place, digest, lying


class WorkerExtension:
    """Mixed into vLLM's worker; all of it is called by `collective_rpc`."""

    model_runner: Any

    def rlsched_describe(self) -> Json:
        """What runs here."""
        device = str(current_platform.device_type)
        return {"version": vllm.__version__, "device": device, "core": os.getpid()}

    def rlsched_seed(self, seed: int) -> Json:
        """Sample from this seed on."""
        torch.manual_seed(seed)
        return {}

    def rlsched_load(self, path: str, size: int, places: Iterable[Place]) -> Json:
        """Load the parameters that lie in a file; the digest of what is computed with from now on."""
        buffer = Staging().at(path, size)
        given = {name: lying(buffer, dtype, shape, offset) for name, dtype, shape, offset in places}
        self.reload_weights(weights_iterator=iter(given.items()))  # type: ignore[attr-defined]
        model = self.model_runner.get_model()
        with torch.inference_mode():
            return {"digest": digest({name: found(model, name, len(tensor)) for name, tensor in given.items()})}


def found(model: Any, name: str, rows: int) -> torch.Tensor:
    """The parameter that vLLM computes with in the place of a Hugging Face model's parameter of that name."""
    owner, _, kind = name.rpartition(".")
    above, _, own = owner.rpartition(".")
    for whole, parts in getattr(model, "packed_modules_mapping", {}).items():
        if own in parts:
            layer = model.get_submodule(f"{above}.{whole}")
            return computed(layer, kind).split(layer.output_sizes)[parts.index(own)]
    return computed(model.get_submodule(owner), kind)[:rows]


def computed(layer: Any, kind: str) -> torch.Tensor:
    """A layer's parameter; a packed matrix as the layer's answers to unit vectors."""
    looked_up = isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead)
    if kind == "weight" and hasattr(layer, "cpu_linear") and not looked_up:
        width = layer.embedding_dim if isinstance(layer, VocabParallelEmbedding) else layer.input_size
        units = torch.eye(width, dtype=layer.weight.dtype)
        return torch.as_tensor(layer.cpu_linear(units, layer.weight, None)).t()
    return torch.as_tensor(getattr(layer, kind))
