"""Paged KV memory: how many blocks the requests hold, and how many decode steps fit before they run out.

A request with n tokens in KV holds ⌈n / block_size⌉ blocks. Those that decode grow together, by one token in every
step, so it is enough to know how many of them open a new block in each phase of a cycle of ``block_size`` steps:
no question here loops over requests. While memory is ample an upper bound answers in O(1); near the brim the
phases answer exactly in O(block_size).
"""


def blocks_of(tokens: int, block_size: int) -> int:
    """Blocks that hold ``tokens`` tokens of one request."""
    return -(-tokens // block_size)


class BlockPool:
    """The blocks of one engine, counted and never named: which block is whose makes no difference to time."""

    __slots__ = ("_due", "_phase", "block_size", "fixed", "growing", "num_blocks", "tokens")

    def __init__(self, block_size: int, num_blocks: int) -> None:
        self.block_size = block_size
        self.num_blocks = num_blocks
        #: Requests that decode, hence grow by a token in every step.
        self.growing = 0
        #: Tokens in KV of those, together.
        self.tokens = 0
        #: Blocks of prompts under way: these grow by chunks, and whoever computes the chunks adds them here.
        self.fixed = 0
        #: Steps taken, modulo the block size.
        self._phase = 0
        #: For each phase, how many decoding requests find their last block full there and need another.
        self._due = [0] * block_size

    def enter(self, tokens: int) -> None:
        """A request with ``tokens`` tokens in KV starts to decode."""
        self.growing += 1
        self.tokens += tokens
        self._due[(self._phase - tokens) % self.block_size] += 1

    def leave(self, tokens: int) -> None:
        """A decoding request, grown to ``tokens`` tokens in KV, gives its blocks back."""
        self.growing -= 1
        self.tokens -= tokens
        self._due[(self._phase - tokens) % self.block_size] -= 1

    def advance(self, steps: int) -> None:
        """Every decoding request has grown by ``steps`` tokens."""
        self.tokens += self.growing * steps
        self._phase = (self._phase + steps) % self.block_size

    @property
    def used(self) -> int:
        """Blocks held, exactly."""
        # What the last blocks leave empty follows from the phase in which they will be full.
        slack = sum(n * ((due - self._phase) % self.block_size) for due, n in enumerate(self._due))
        return self.fixed + (self.tokens + slack) // self.block_size

    @property
    def growth(self) -> int:
        """Blocks that the next step's decoded tokens open."""
        return self._due[self._phase]

    def fits(self, blocks: int) -> bool:
        """Whether ``blocks`` more are free beside those that the next step's decoded tokens open."""
        if self._at_most(1) + blocks <= self.num_blocks:
            return True
        return self.used + self.growth + blocks <= self.num_blocks

    def horizon(self, limit: int) -> int:
        """How many decode steps fit in a row, up to ``limit``."""
        if self._at_most(limit) <= self.num_blocks:
            return limit
        # A whole cycle of block_size steps opens one block for each request; what remains ends within a cycle.
        cycles, free = divmod(self.num_blocks - self.used, self.growing)
        steps = cycles * self.block_size
        phase = self._phase
        while steps < limit and self._due[phase] <= free:
            free -= self._due[phase]
            steps += 1
            phase = (phase + 1) % self.block_size
        return min(steps, limit)

    def _at_most(self, steps: int) -> int:
        """An upper bound on the blocks held after ``steps`` decode steps: as if every last block had one token."""
        return self.fixed + (self.tokens + self.growing * (steps + self.block_size - 1)) // self.block_size
