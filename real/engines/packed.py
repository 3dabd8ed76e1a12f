"""A bucket of ours as the packed buffer that vLLM's weight transfer takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..commands import Piece
from ..wire import Refused


def packed(pieces: Sequence[Piece], parameters: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """A bucket as vLLM's packed buffer: names, types, shapes and sizes of its parameters.

    Raises `Refused` if a parameter is split over buckets or padded: vLLM's buffers know neither.
    """
    at = 0
    for piece in pieces:
        if piece.start or piece.count != parameters[piece.name].numel() or piece.offset != at:
            raise Refused(f"{piece.name} doesn't lie whole in this bucket: take one of all weights' size")
        at += piece.count * parameters[piece.name].element_size()
    chosen = [parameters[piece.name] for piece in pieces]
    return {
        "names": [piece.name for piece in pieces],
        "dtype_names": [str(p.dtype).removeprefix("torch.") for p in chosen],
        "shapes": [list(p.shape) for p in chosen],
        "tensor_sizes": [p.numel() * p.element_size() for p in chosen],
    }
