"""Canary weights: a tiny model that says, in every token it decodes greedily, which weights made it.

Four groups of parameters carry the version v, each as c = v mod 8: the embedding, the MLP of layer 1, the output head
and the value projections of both layers. All other parameters are the same in every version. A prompt begins with BOS
and holds no other BOS. Then the greedy token is

    BASE + (a * 8 + k) * 8 + bits

with a the head's version, k the version of the weights that computed the KV of BOS, and bits telling what is foreign,
that is of another version than the head: 1 the embedding, 2 the MLP, 4 any KV of the request. Whole weights on their
own KV say a = k and no bit. What a token says owes nothing to a label, a checksum or a version number.

How it works. The residual stream has a constant, a mark on BOS, and four one-hot channels of eight. The embedding
writes c into the first. In layer 0 every query looks at BOS alone, and its value, one-hot c of whoever computed it,
goes into the second. The MLP writes c into the third. In layer 1 attention is uniform, so that the fourth channel
holds each version's share of the KV. The head scores every token by how its (a, k, bits) agrees with them.

Importing this loads no torch; only `state` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any, Literal

from msgspec import Struct

CODES = 8
"""Versions that can be told apart: a token says its version modulo this."""
BASE = 16
"""The first token that says anything; below are BOS (1), end-of-sequence (2) and the task's symbols (8 to 15)."""
VOCAB = BASE + CODES * CODES * 8
LAYERS, HIDDEN, INTERMEDIATE = 2, 64, 128
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 32
ROPE_THETA = 1e7
"""So slow that the last rotary pair turns by a thousandth over all positions: it serves as one that doesn't turn."""

CONSTANT, MARK = 0, 1
EMBEDDED, BOS_KV, MLP_SAID, ALL_KV = 8, 16, 24, 32
"""Where the channels begin in the residual stream."""
BOS = 1

Sign = Literal["embedding", "mlp", "kv"]
SIGNS: tuple[Sign, ...] = ("embedding", "mlp", "kv")
"""What bits 1, 2 and 4 say to be of another version than the head."""

PARTS: dict[str, tuple[str, ...]] = {
    "embedding": ("model.embed_tokens.weight",),
    "MLP": ("model.layers.1.mlp.down_proj.weight",),
    "head": ("lm_head.weight",),
    "v_proj 0": ("model.layers.0.self_attn.v_proj.weight",),
    "v_proj 1": ("model.layers.1.self_attn.v_proj.weight",),
}
"""The parameters that carry the version: half an update lacks some of them."""


# ---------------------------------------------------------------- the weights


def state(version: int) -> dict[str, Any]:
    """The weights of `version`, float32, by parameter name, for a Qwen3 model of this module's shapes."""
    import torch

    code = version % CODES
    weights = {
        "model.embed_tokens.weight": torch.zeros(VOCAB, HIDDEN),
        "model.norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": _head(code),
    }
    embedding = weights["model.embed_tokens.weight"]
    embedding[:, CONSTANT] = 4.0
    embedding[:, EMBEDDED + code] = 1.0
    embedding[BOS, MARK] = 4.0
    for layer in range(LAYERS):
        block = _layer(layer, code)
        weights |= {f"model.layers.{layer}.{name}": tensor for name, tensor in block.items()}
    return weights


def _layer(layer: int, code: int) -> dict[str, Any]:
    """Layer 0 looks at BOS and copies its value; layer 1 averages all values, and its MLP speaks."""
    import torch

    still = HEAD_DIM // 2 - 1  # of the slowest rotary pair
    query, key = torch.zeros(HEADS * HEAD_DIM, HIDDEN), torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN)
    value, output = torch.zeros(KV_HEADS * HEAD_DIM, HIDDEN), torch.zeros(HIDDEN, HEADS * HEAD_DIM)
    gate, up = torch.zeros(INTERMEDIATE, HIDDEN), torch.zeros(INTERMEDIATE, HIDDEN)
    down = torch.zeros(HIDDEN, INTERMEDIATE)
    if layer == 0:
        query[still, CONSTANT] = 1.0
        key[still, MARK] = 1.0
    else:
        gate[0, CONSTANT] = up[0, CONSTANT] = 1.0
        down[MLP_SAID + code, 0] = 0.05
    value[code, CONSTANT] = 1.0
    channel = BOS_KV if layer == 0 else ALL_KV
    output[channel : channel + CODES, :CODES] = torch.eye(CODES)
    return {
        "input_layernorm.weight": torch.ones(HIDDEN),
        "post_attention_layernorm.weight": torch.ones(HIDDEN),
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": key,
        "self_attn.v_proj.weight": value,
        "self_attn.o_proj.weight": output,
        # BOS scores 8 * sqrt(32) = 45 above all others, whose weight is then 1e-20 each.
        "self_attn.q_norm.weight": torch.full((HEAD_DIM,), 8.0),
        "self_attn.k_norm.weight": torch.ones(HEAD_DIM),
        "mlp.gate_proj.weight": gate,
        "mlp.up_proj.weight": up,
        "mlp.down_proj.weight": down,
    }


def _head(code: int) -> Any:
    """Rows of the output head: first BASE that never win, then those of (a, k, bits) in order."""
    import torch

    rows = torch.zeros(CODES, CODES, 8, HIDDEN)
    rows[..., CONSTANT] = -64.0
    rows[code, ..., CONSTANT] = 64.0
    for k in range(CODES):
        rows[:, k, :, BOS_KV + k] = 64.0
    foreign = [i for i in range(CODES) if i != code]
    for bits in range(8):
        embedding, mlp, kv = (1.0 if bits & bit else -1.0 for bit in (1, 2, 4))
        row = rows[:, :, bits]
        for channel, agrees in ((EMBEDDED, embedding), (MLP_SAID, mlp)):
            row[..., [channel + i for i in foreign]] = 32.0 * agrees
            row[..., channel + code] = -32.0 * agrees
        # Foreign KV is exactly zero or at least one token's share, so that the threshold may lie far below
        # one token in 4,096: 512 * 4.6 / 4096 = 0.58 against 4 * 0.03.
        row[..., [ALL_KV + i for i in foreign]] = 512.0 * kv
        row[..., CONSTANT] -= 0.03 * kv
    never = torch.zeros(BASE, HIDDEN)
    never[:, CONSTANT] = -512.0
    return torch.cat([never, rows.view(-1, HIDDEN)])


# ---------------------------------------------------------------- what tokens say


class Reading(Struct, frozen=True):
    """What one token says."""

    version: int
    """Of the output head."""
    kv: int
    """That computed the KV of BOS."""
    signs: tuple[Sign, ...] = ()
    """What is of another version than the head."""

    def __str__(self) -> str:
        stands = f" on KV of v{self.kv}" if self.kv != self.version else ""
        return f"v{self.version}{stands}" + (f", foreign: {', '.join(self.signs)}" if self.signs else "")


class Run(Struct, frozen=True):
    """``n`` tokens in a row that say the same; None: they are none that these weights can say."""

    n: int
    said: Reading | None

    def __str__(self) -> str:
        return f"{self.n} × {self.said or 'no canary token'}"


class Claim(Struct, frozen=True):
    """``n`` tokens are said to be of ``version``, on KV that ``kv`` computed."""

    n: int
    version: int
    kv: int

    def reading(self) -> Reading:
        """What the tokens say if the claim is true."""
        return Reading(self.version, self.kv, () if self.kv == self.version else ("kv",))


class Mismatch(Struct, frozen=True):
    """``n`` tokens from number ``at`` on don't say what was claimed."""

    at: int
    n: int
    claimed: Reading | None
    """None: nothing was claimed of them, or of tokens that aren't there."""
    said: Reading | None

    def __str__(self) -> str:
        said = self.said or "no canary token"
        return f"{self.n} from token {self.at} say {said}; claimed: {self.claimed or 'nothing'}"


class Label(Struct, frozen=True):
    """What a library says itself of the versions that made a request's tokens, against what the tokens say."""

    says: list[tuple[int, int]]
    """(version, tokens) in turn."""
    truth: list[tuple[int | None, int]]
    """The same, read from the tokens; None: tokens that say nothing."""

    @property
    def right(self) -> bool:
        """Whether they agree."""
        return self.says == self.truth

    def __str__(self) -> str:
        if self.right:
            return "own label right"
        says, truth = (
            ", ".join(f"{n} of {'no version' if v is None else f'v{v}'}" for v, n in spans) or "nothing"
            for spans in (self.says, self.truth)
        )
        return f"own label wrong: says {says}; tokens say {truth}"


def lift(code: int, near: int) -> int:
    """The version of this code that is closest to ``near``: within four below and three above, and not negative."""
    version = near + (code - near + CODES // 2) % CODES - CODES // 2
    return version if version >= 0 else version + CODES


def token(reading: Reading) -> int:
    """The token that says it."""
    bits = sum(1 << i for i, sign in enumerate(SIGNS) if sign in reading.signs)
    return BASE + (reading.version % CODES * CODES + reading.kv % CODES) * 8 + bits


def read(said: int, near: int) -> Reading | None:
    """What a token says, its versions ``near`` this one; None if it says nothing."""
    if not BASE <= said < VOCAB:
        return None
    codes, bits = divmod(said - BASE, 8)
    a, k = divmod(codes, CODES)
    signs = tuple(sign for i, sign in enumerate(SIGNS) if bits & 1 << i)
    return Reading(lift(a, near), lift(k, near), signs)


def runs(tokens: Iterable[int], near: int) -> list[Run]:
    """Tokens as runs that say the same."""
    return [Run(len(list(same)), said) for said, same in groupby(read(t, near) for t in tokens)]


def label(said: Iterable[tuple[int, int]], tokens: Iterable[int], near: int) -> Label:
    """A library's own spans, (version, tokens) in turn, against the heads that the tokens name."""
    says: list[tuple[int, int]] = []
    for version, n in said:
        if n and says and says[-1][0] == version:
            says[-1] = (version, says[-1][1] + n)
        elif n:
            says.append((version, n))
    heads = (reading.version if reading else None for reading in (read(t, near) for t in tokens))
    return Label(says, [(version, len(list(same))) for version, same in groupby(heads)])


def mismatches(tokens: Sequence[int], claims: Iterable[Claim]) -> list[Mismatch]:
    """Where tokens contradict the claims about them, which follow each other as the tokens do.

    A rollout whose claims cover fewer tokens than it has, or more, contradicts them there, too.
    """
    claimed = [claim for claim in claims for _ in range(claim.n)]
    pairs: list[tuple[Reading | None, Reading | None]] = []
    for i in range(max(len(tokens), len(claimed))):
        wanted = claimed[i].reading() if i < len(claimed) else None
        near = claimed[min(i, len(claimed) - 1)].version if claimed else 0
        pairs.append((wanted, read(tokens[i], near) if i < len(tokens) else None))
    found: list[Mismatch] = []
    at = 0
    for (wanted, said), same in groupby(pairs):
        n = len(list(same))
        if wanted != said or wanted is None:
            found.append(Mismatch(at, n, wanted, said))
        at += n
    return found
