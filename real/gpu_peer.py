"""The other process of the IPC step: it opens a staging file, says what is in the buffer, and turns its first byte.

Run as `python -m rlsched.real.gpu_peer FILE SIZE DEVICE`; prints the fingerprint of what it found.
"""

from __future__ import annotations

import sys

from . import cuda
from .digest import fingerprint
from .weights import Staging


def main(file: str, size: str, device: str) -> int:
    """Look at the buffer, change one byte of it, and say what was there before."""
    cuda.choose(device)
    buffer = Staging().at(file, int(size))
    print(int(fingerprint(buffer)))
    buffer[0] ^= 255
    cuda.settle(buffer.device)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
