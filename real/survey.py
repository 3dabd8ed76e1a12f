"""What the installed engines can do here: each is started, asked, and ended."""

import tempfile
from pathlib import Path

from rlsched.errors import InputError

from .channel import CommandFailed
from .child import ChildDied
from .client import EngineClient
from .config import EngineConfig
from .engines import Capabilities
from .installs import RECIPES, EngineKind, require


async def capabilities(kind: EngineKind, config: EngineConfig | None = None) -> Capabilities:
    """Of one engine, by its own word, with the embedded engine's default model. Raises InputError if it isn't
    installed or doesn't start."""
    found, recipe = require(kind), RECIPES[kind]
    with tempfile.TemporaryDirectory(prefix="rlsched-") as folder:
        try:
            client = await EngineClient.start(
                kind,
                config or EngineConfig(),
                Path(folder),
                module=recipe.module,
                interpreter=found.interpreter,
                environment=recipe.environment,
            )
        except (ChildDied, CommandFailed) as error:
            raise InputError(f"engine {kind} doesn't start: {error}") from None
        try:
            return client.capabilities
        finally:
            await client.close()
