"""vLLM behind the same protocol: what it generates, says when interrupted, and decodes after updates; and whole runs."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rlsched.checker import check
from rlsched.history import Reader
from rlsched.naming import parse
from rlsched.facts import Segment
from rlsched.real.canary import Reading, runs
from rlsched.real.canary_forger import Forger
from rlsched.real.client import EngineClient
from rlsched.real.commands import Sample
from rlsched.real.config import EngineConfig, TrainerConfig
from rlsched.real.installs import RECIPES, engine as look
from rlsched.real.job import engines, perform
from rlsched.real.model import CANARY, ModelSpec, build
from rlsched.real.rig import Rig
from rlsched.real.transport import BroadcastBuckets, Buckets, Checkpoints, SharedBuckets
from rlsched.real.wire import Refused
from rlsched.replay import replay

pytestmark = pytest.mark.real

BOS = 1
LONG = [BOS, *(8 + i % 8 for i in range(69))]
"""Two whole pages of 32 tokens and a rest: enough for a prefix to be shared."""
