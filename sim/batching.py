"""Continuous batching as vLLM V1 does it, counted in steps: who takes part in the next one. No time lives here.

A step first gives every running request its due in the order of admission, a decoded token or the next chunk of a
prompt, then admits waiting requests first come, first served, as far as seats, the step's token budget and blocks
go. The step that computes the last prompt token also samples the first new token. A running request that finds no
block takes those of the newest admitted, whose tokens stay but whose KV must be computed again; it goes to the
head of the queue, and a step that preempted admits nobody.

Budgets leave at most one prompt half computed between steps, and it is the newest admitted. Every other running
request decodes in every step, so the step of a request's last token is known with its first.
"""

from collections import deque
from heapq import heappop, heappush

import msgspec

from rlsched.errors import InputError

from .kv import BlockPool, blocks_of

#: Admission numbers of requests that have none: in the queue, and not even there.
WAITING = -1
OUTSIDE = -2


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What bounds a batch. The defaults are those of vLLM's scheduler config; a server's depend on its GPU."""

    #: Blocks of KV memory (vLLM: ``num_gpu_blocks_override``, otherwise profiled).
    num_blocks: int
    #: Tokens in a block (vLLM: ``block_size``, 16).
    block_size: int = 16
    #: Requests that run at once (vLLM: ``max_num_seqs``, 128).
    max_num_seqs: int = 128
    #: Tokens computed in a step, a decoding request counting 1 (vLLM: ``max_num_batched_tokens``, 2048).
    max_batch_tokens: int = 2048

    def __post_init__(self) -> None:
        if min(self.num_blocks, self.block_size, self.max_num_seqs) < 1:
            raise InputError("num_blocks, block_size and max_num_seqs must be at least 1")
        if self.max_batch_tokens < self.max_num_seqs:
            # Otherwise a full batch couldn't decode all its requests in one step. vLLM refuses it too.
            raise InputError(f"max_batch_tokens {self.max_batch_tokens} < max_num_seqs {self.max_num_seqs}")


class Counters(msgspec.Struct):
    """What a batch has done since it was built. New tokens are ``decode_tokens + prefills``."""

    #: Steps completed.
    steps: int = 0
    #: Tokens decoded: one per decoding request and step.
    decode_tokens: int = 0
    #: Prompt tokens computed, those computed again included.
    prompt_tokens: int = 0
    #: Prompts computed to their end; each sampled one token.
    prefills: int = 0
    #: Requests put back for want of blocks.
    preemptions: int = 0
    #: Requests put back by order.
    retractions: int = 0


class Sequence(msgspec.Struct, gc=False, eq=False):
    """A request inside the engine. It equals only itself."""

    id: int
    #: Tokens it came with: the prompt and what earlier attempts generated.
    given: int
    #: New tokens it must generate.
    quota: int
    #: New tokens generated; while it decodes, as they will be at its end.
    made: int = 0
    #: Tokens in KV while its prompt is under way; 0 while it waits.
    computed: int = 0
    #: The step that generates its last token; 0 unless it decodes.
    ends: int = 0
    #: Its place in the order of admission, or else WAITING or OUTSIDE.
    order: int = OUTSIDE


class Batch:
    """The waiting and the running requests of one engine, with their blocks."""

    __slots__ = ("_admitted", "_ends", "chunks", "counters", "half", "limits", "pool", "running", "waiting")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.pool = BlockPool(limits.block_size, limits.num_blocks)
        self.counters = Counters()
        self.waiting: deque[Sequence] = deque()
        #: In the order of admission.
        self.running: dict[int, Sequence] = {}
        #: The prompt that stands half computed, if any.
        self.half: Sequence | None = None
        #: The prompt tokens that the step in progress computes, by request.
        self.chunks: list[tuple[Sequence, int]] = []
        self._admitted = 0
        #: (last step, order, request) of those that decode. Entries of requests that were put back since are stale.
        self._ends: list[tuple[int, int, Sequence]] = []

    @property
    def kv_tokens(self) -> int:
        """Tokens in KV of the running requests, as the next step finds them."""
        return self.pool.tokens + (self.half.computed if self.half is not None else 0)

    def enqueue(self, seq: Sequence) -> None:
        """A request takes its place at the tail of the queue."""
        seq.order = WAITING
        self.waiting.append(seq)

    def refuse_oversized(self, given: int, quota: int) -> None:
        """Raises InputError if a request couldn't run to its end even with all the blocks to itself."""
        # The last token is sampled and never fed back, so it needs no KV.
        tokens = given + quota - 1
        blocks = blocks_of(tokens, self.limits.block_size)
        if blocks > self.limits.num_blocks:
            raise InputError(
                f"needs KV for {tokens} tokens, {blocks} blocks of {self.limits.block_size};"
                f" the engine has {self.limits.num_blocks}"
            )

    # ---- composing a step

    def compose(self) -> list[Sequence]:
        """Settles who takes part in the next step; returns those preempted for it, newest first."""
        lost = self._continue_running()
        if not lost:
            self._admit()
        return lost

    def span(self) -> int:
        """How many steps run just like the composed one, if nothing comes in: 0 if there's nothing to run."""
        if self.chunks:
            return 1
        ends = self._ends
        while ends and ends[0][2].order != ends[0][1]:
            heappop(ends)
        return self.pool.horizon(ends[0][0] - self.counters.steps) if ends else 0

    def _continue_running(self) -> list[Sequence]:
        half, chunk, blocks = self.half, 0, 0
        if half is not None:
            chunk = min(half.given + half.made - half.computed, self.limits.max_batch_tokens - self.pool.growing)
            size = self.limits.block_size
            blocks = blocks_of(half.computed + chunk, size) - blocks_of(half.computed, size)
        lost = []
        # vLLM asks request by request and preempts when one finds no block. As the newest goes first, the survivors
        # are the same: the longest head of the running whose needs fit together.
        while not self.pool.fits(blocks):
            lost.append(self._put_back())
            self.counters.preemptions += 1
            blocks = 0  # the half-computed prompt is the newest, so it has just gone
        if half is not None and not lost:
            self._compute(half, chunk, blocks)
        return lost

    def _admit(self) -> None:
        waiting, running = self.waiting, self.running
        budget = self.limits.max_batch_tokens - self.pool.growing - sum(chunk for _, chunk in self.chunks)
        while waiting and budget and len(running) < self.limits.max_num_seqs:
            seq = waiting[0]
            chunk = min(seq.given + seq.made, budget)
            blocks = blocks_of(chunk, self.limits.block_size)
            if not self.pool.fits(blocks):
                break
            waiting.popleft()
            self._admitted += 1
            seq.order = self._admitted
            running[seq.id] = seq
            self._compute(seq, chunk, blocks)
            budget -= chunk

    def _compute(self, seq: Sequence, chunk: int, blocks: int) -> None:
        self.pool.fixed += blocks
        self.chunks.append((seq, chunk))

    # ---- completing steps

    def advance(self, steps: int) -> list[Sequence]:
        """Completes ``steps`` steps as composed; returns the requests that the last of them finished, in order."""
        counters, pool, ends = self.counters, self.pool, self._ends
        counters.steps += steps
        counters.decode_tokens += pool.growing * steps
        pool.advance(steps)
        if self.chunks:
            self._complete_chunks()
        finished = []
        while ends and ends[0][0] == counters.steps:
            _, order, seq = heappop(ends)
            if seq.order == order:
                finished.append(seq)
                del self.running[seq.id]
                pool.leave(seq.given + seq.quota - 1)
        return finished

    def _complete_chunks(self) -> None:
        counters, pool = self.counters, self.pool
        self.half = None
        for seq, chunk in self.chunks:
            seq.computed += chunk
            counters.prompt_tokens += chunk
            if seq.computed < seq.given + seq.made:
                self.half = seq
                continue
            counters.prefills += 1
            pool.fixed -= blocks_of(seq.computed, self.limits.block_size)
            pool.enter(seq.computed)
            seq.ends = counters.steps + seq.quota - seq.made - 1
            seq.made = seq.quota
            heappush(self._ends, (seq.ends, seq.order, seq))
        self.chunks.clear()

    # ---- looking at requests, and taking them out between steps

    def tokens(self, seq: Sequence) -> int:
        """New tokens generated up to the last completed step."""
        return seq.made - (seq.ends - self.counters.steps) if seq.ends else seq.made

    def kv_of(self, seq: Sequence) -> int:
        """Tokens of a request in KV after the last completed step."""
        return seq.given + self.tokens(seq) - 1 if seq.ends else seq.computed

    def remove(self, seq: Sequence) -> None:
        """Takes a request out, be it running or waiting."""
        if seq.order == WAITING:
            self.waiting.remove(seq)
        else:
            del self.running[seq.id]
            self._free(seq)

    def retract(self) -> list[Sequence]:
        """Puts every running request back to the head of the queue, in order; returns them, newest first."""
        lost = []
        while self.running:
            lost.append(self._put_back())
            self.counters.retractions += 1
        return lost

    def _put_back(self) -> Sequence:
        _, seq = self.running.popitem()
        self._free(seq)
        self.waiting.appendleft(seq)
        return seq

    def _free(self, seq: Sequence) -> None:
        if seq.ends:
            self.pool.leave(self.kv_of(seq))
            seq.made = self.tokens(seq)
        else:
            self.pool.fixed -= blocks_of(seq.computed, self.limits.block_size)
        if seq is self.half:
            self.half = None
        seq.computed = seq.ends = 0
        seq.order = WAITING
