"""``python -m rlsched``."""

from .cli import main

main()
