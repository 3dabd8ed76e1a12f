"""A whole run on canary weights: what every token says of its version, compared with labels and installs.

The trainer takes its real steps and then holds the canary weights of the version that it trained, so that everything
else, engines, transports and schedule, is that of any run.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import zstandard
from msgspec import Struct
from msgspec.structs import replace

from rlsched.commands import Generate
from rlsched.errors import WorldError
from rlsched.facts import Installed, Segment
from rlsched.history import Event, Reader
from rlsched.policy import Policy

from .canary import Claim, Mismatch, mismatches
from .installs import EngineKind
from .job import engines, perform
from .model import CANARY
from .rig import Rig
from .rollouts import Rollout, beside
from .setup import Setup, load


def canary(setup: Setup) -> Setup:
    """The same job on canary weights, decoded greedily."""
    return replace(
        setup,
        engine=replace(setup.engine, model=CANARY, temperature=0.0),
        trainer=replace(setup.trainer, model=CANARY),
    )


class Audit(Struct):
    """What the tokens of a run said, of the rollouts that were scored."""

    rollouts: int = 0
    tokens: int = 0
    versions: list[int] = []
    """That tokens were claimed to be of, and by their own word are if nothing mismatches."""
    mixed: int = 0
    """Rollouts of more than one version."""
    labels: dict[int, list[Mismatch]] = {}
    """By rollout, where its tokens contradict the versions and KV of its segments."""
    installs: dict[int, list[Mismatch]] = {}
    """By rollout, where they contradict what was installed on its engine when the segment came."""

    @property
    def good(self) -> bool:
        """Whether anything was said, and nothing contradicts it."""
        return self.tokens > 0 and not self.labels and not self.installs


def audit(events: Iterable[Event], rollouts: Iterable[Rollout]) -> Audit:
    """Compare the raw rollouts of a run with its history."""
    installed: dict[int, int] = {}
    labelled: dict[int, list[Claim]] = {}
    held: dict[int, list[Claim]] = {}
    for event in events:
        match event:
            case Installed() if event.ok:
                installed[event.engine] = event.version
            case Generate():
                for work in event.work:
                    if not work.have:  # a new rollout, or one whose tokens are thrown away
                        labelled[work.rollout], held[work.rollout] = [], []
            case Segment() if event.n:
                labelled[event.rollout].append(Claim(event.n, event.version, event.kv_from))
                held[event.rollout].append(Claim(event.n, installed[event.engine], event.kv_from))
            case _:
                pass
    found, versions = Audit(), set()
    for rollout in rollouts:
        claims = labelled[rollout.rollout]
        own = {claim.version for claim in claims}
        versions |= own
        found.rollouts += 1
        found.tokens += len(rollout.output)
        found.mixed += len(own) > 1
        if wrong := mismatches(rollout.output, claims):
            found.labels[rollout.rollout] = wrong
        if wrong := mismatches(rollout.output, held[rollout.rollout]):
            found.installs[rollout.rollout] = wrong
    found.versions = sorted(versions)
    return found


def logged(history: Path) -> Iterator[Rollout]:
    """The raw rollouts that lie beside a history."""
    decode = msgspec.json.Decoder(Rollout).decode
    with zstandard.open(beside(history), "rb") as file:
        for line in file.read().splitlines():
            yield decode(line)


async def conduct(policy: Policy, steps: int | None, seed: int, engine: EngineKind = "transformers") -> Audit:
    """Run the default job on canary weights under ``policy``, and audit it.

    Raises InputError if the engine isn't installed, WorldError if the run fails.
    """
    setup = canary(load(None, steps, engine))
    with TemporaryDirectory() as folder:
        history = Path(folder) / "history.jsonl"
        rig = await Rig.start(setup, engines(policy, setup))
        try:
            _, end = await perform(rig, policy, seed, history)
        finally:
            await rig.close()
        if not end.ok:
            raise WorldError(end.why)
        return audit(Reader(history).events(), logged(history))
