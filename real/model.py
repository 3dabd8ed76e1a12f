"""The small causal language model, made here: nothing is downloaded and nothing is read from disk.

Version 0 of the weights is a function of the spec and of the kind of device alone, so that an engine and a trainer in
different processes (and different torch builds of one major line) start from equal parameters without exchanging any.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import msgspec

from . import canary


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Qwen3-shaped decoder. The default learns the cyclic-repeat task on one core in about a minute."""

    vocab: int = 32  # tokens
    layers: int = 2
    hidden: int = 64
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32  # vLLM on CPU has no smaller one; heads of 16 learn to copy in twice the versions
    intermediate: int = 128
    init_std: float = 0.08  # 0.02, the usual default, learns far worse at this size
    rope_theta: float = 10000.0
    max_positions: int = 4096  # tokens of prompt and output together
    dtype: str = "float32"  # a torch dtype by name
    tied: bool = False  # whether the output head is the embedding
    seed: int = 0  # of the version 0 weights
    weights: Literal["random", "canary"] = "random"  # "canary": they say their version; shapes must be those of CANARY

    def parameters(self) -> int:
        """How many parameters, from the shapes alone."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads) + 2 * self.head_dim
        mlp = 3 * self.hidden * self.intermediate
        ends = (1 if self.tied else 2) * self.vocab * self.hidden
        return ends + self.layers * (attention + mlp + 2 * self.hidden) + self.hidden


#: About 268 MB of weights in few, large tensors: for tests of what a sleeping engine gives back.
WIDE = ModelSpec(vocab=512, layers=4, hidden=1024, heads=16, kv_heads=16, head_dim=64, intermediate=4096, init_std=0.02)

#: Qwen3-0.6B's shape, 596 million parameters, in bfloat16: for GPUs.
QWEN3_06B = ModelSpec(
    vocab=151936,
    layers=28,
    hidden=1024,
    heads=16,
    kv_heads=8,
    head_dim=128,
    intermediate=3072,
    init_std=0.02,
    rope_theta=1e6,
    dtype="bfloat16",
    tied=True,
)

#: Weights whose version can be read off the greedy tokens; a trainer's are those of the version that it trains.
CANARY = ModelSpec(
    vocab=canary.VOCAB,
    layers=canary.LAYERS,
    hidden=canary.HIDDEN,
    heads=canary.HEADS,
    kv_heads=canary.KV_HEADS,
    head_dim=canary.HEAD_DIM,
    intermediate=canary.INTERMEDIATE,
    rope_theta=canary.ROPE_THETA,
    weights="canary",
)


def shaped(spec: ModelSpec) -> Any:
    """A transformers `Qwen3ForCausalLM` of these shapes with no weights to speak of, on torch's default device."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=spec.vocab,
        num_hidden_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_key_value_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        intermediate_size=spec.intermediate,
        max_position_embeddings=spec.max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": spec.rope_theta},
        tie_word_embeddings=spec.tied,
        attention_dropout=0.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return Qwen3ForCausalLM(config).to(getattr(torch, spec.dtype))


def build(spec: ModelSpec, device: str = "cpu") -> Any:
    """A model with the version 0 weights, in evaluation mode, made where it will be."""
    import torch

    with torch.random.fork_rng(devices=[]), torch.device(device):
        model = shaped(spec)
    fill(model, spec)
    return model.eval()


def fill(model: Any, spec: ModelSpec, version: int = 0) -> None:
    """Write the weights of `version` into `model`, in place. Random ones are normal matrices and unit norms, drawn in
    name order where the parameters are, and only version 0 can be made here; canary weights can be of any version."""
    import torch

    if spec.weights == "canary":
        model.load_state_dict(canary.state(version))
        return
    if version:
        raise ValueError(f"version {version} of random weights comes only from training")
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    generator = torch.Generator(parameters[0].device).manual_seed(spec.seed)
    with torch.no_grad():
        for parameter in parameters:
            if parameter.dim() < 2:
                parameter.fill_(1.0)
            else:
                drawn = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
                parameter.copy_(drawn.normal_(0.0, spec.init_std, generator=generator))


def save(spec: ModelSpec, folder: Path) -> Path:
    """Version 0 as a Hugging Face checkpoint, for engines that load from disk."""
    build(spec).save_pretrained(folder)
    return folder
