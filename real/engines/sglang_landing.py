"""The engine child's own copy of the weights: where transfers land, and what the server is compared with.

A transfer comes bucket by bucket, bit for bit, as it does to the embedded engine. Only a complete one goes on into the
server, whose parameters are then compared with this copy, tensor by tensor, by SGLang's own checksum. SGLang fuses some
parameters: query, key and value, and the MLP's gate and up projections.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from collections.abc import Sequence
from typing import Any

import torch

from ..model import ModelSpec, build, fill
from ..weights import WeightSet
from .residence import Residence

FUSED = {
    "self_attn.q_proj.": ("self_attn.qkv_proj.", 0),
    "self_attn.k_proj.": ("self_attn.qkv_proj.", 1),
    "self_attn.v_proj.": ("self_attn.qkv_proj.", 2),
    "mlp.gate_proj.": ("mlp.gate_up_proj.", 0),
    "mlp.up_proj.": ("mlp.gate_up_proj.", 1),
}
"""Part of a Hugging Face name -> that of the server's fused parameter, and the place in it."""
PADDED = ("model.embed_tokens.weight", "lm_head.weight")
"""Parameters with a row for each token: the server has them filled up with zeros to a multiple of `ROWS`."""
ROWS = 64


class Elsewhere:
    """The memory of the server, which is asked over HTTP to drop and take it."""

    def drop(self, parts: Sequence[str]) -> None:
        """Nothing of it is in this process."""

    def take(self, parts: Sequence[str]) -> None:
        """Nothing of it is in this process."""

    def forget_kv(self) -> None:
        """Nothing of it is in this process."""


class Landing(Residence):
    """Weights of one engine, with the rules that every engine's have."""

    def __init__(self, spec: ModelSpec) -> None:
        self._spec = spec
        self.model: Any = build(spec)
        self.weights = WeightSet(self.model)
        super().__init__(self.weights, Elsewhere(), (1, 2))

    def forget(self) -> None:
        """Whole weights of version 0 are in place."""
        fill(self.model, self._spec)
        super().forget()

    def payload(self) -> str:
        """All parameters as `/update_weights_from_tensor` takes them."""
        named = [(name, p.detach()) for name, p in self.weights.parameters.items()]
        return base64.b64encode(pickle.dumps(named)).decode()

    def expected(self) -> dict[str, str]:
        """Checksums of the server's parameters, by its names, as `/weights_checker` gives them."""
        parts: dict[str, dict[int, torch.Tensor]] = {}
        for name, parameter in self.weights.parameters.items():
            fused, place = name, 0
            for part, (whole, index) in FUSED.items():
                if part in name:
                    fused, place = name.replace(part, whole), index
            parts.setdefault(fused, {})[place] = parameter.detach()
            if name in PADDED:
                parts[name][1] = parameter.new_zeros(-len(parameter) % ROWS, *parameter.shape[1:])
        return {name: digest([tensor for _, tensor in sorted(tensors.items())]) for name, tensors in parts.items()}


def digest(tensors: list[torch.Tensor]) -> str:
    """SGLang's checksum of tensors in a row: the first eight bytes of the SHA-256 of their bytes."""
    sha = hashlib.sha256()
    for tensor in tensors:
        sha.update(tensor.contiguous().view(-1).view(torch.uint8).numpy())
    return sha.hexdigest()[:16]
