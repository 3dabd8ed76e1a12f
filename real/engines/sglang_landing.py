"""A landing as SGLang takes it, and what its server is compared with, tensor by tensor, by SGLang's own checksum.

SGLang fuses some parameters: query, key and value, and the MLP's gate and up projections.
"""

from __future__ import annotations

import base64
import hashlib
import pickle
from types import SimpleNamespace

import torch

from .landing import Landing

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


class SglangLanding(Landing):
    """Weights of one engine, in SGLang's terms."""

    def flat(self) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """All parameters, and their bytes one after another, as SGLang cuts up a flattened bucket. Wide elements come
        first, so that each parameter is aligned."""
        found = sorted(self.weights.parameters.items(), key=lambda item: -item[1].element_size())
        named = {name: p.detach() for name, p in found}
        return named, torch.cat([p.contiguous().view(-1).view(torch.uint8) for p in named.values()])

    def payload(self) -> str:
        """All parameters as `/update_weights_from_tensor` takes a flattened bucket."""
        named, flat = self.flat()
        pieces: list[SimpleNamespace] = []
        end = 0
        for name, p in named.items():
            begin, end = end, end + p.numel() * p.element_size()
            place = {"start_idx": begin, "end_idx": end, "numel": end - begin}
            pieces.append(SimpleNamespace(name=name, shape=p.shape, dtype=p.dtype, **place))
        return base64.b64encode(pickle.dumps({"flattened_tensor": flat, "metadata": pieces})).decode()

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
