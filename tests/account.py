"""The account of a history: every token, rollout, group and attempt, from admission to its one end."""

from collections import Counter
from collections.abc import Iterable

from rlsched.commands import Abort, Generate, Train
from rlsched.facts import Scored, Segment
from rlsched.history import Event
from rlsched.notes import Accept, Admit, Cancel, Drop, Reject
from rlsched.sim.scenario import Scenario


class Account:
    """Every rollout's tokens and every group's life, by double entry."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario, self.seed = scenario, seed
        self.admits: dict[int, Admit] = {}
        self.group_of: dict[int, int] = {}
        self.ends: dict[int, str] = {}
        """How each group ended."""
        self.accepted: set[int] = set()
        self.home: dict[int, int] = {}
        """The command of each live rollout: dispatched, not come back."""
        self.tokens: Counter[int] = Counter()
        self.done: set[int] = set()
        self.scored: Counter[int] = Counter()
        self.fates: dict[int, str] = {}
        self.prompts: Counter[int] = Counter()
        self.again: Counter[int] = Counter()
        self.seen: Counter[str] = Counter()

    def due(self, rollout: int) -> int:
        """The workload's length of a rollout."""
        admit, shape = self.admits[self.group_of[rollout]], self.scenario.shape
        sample = rollout - admit.first
        return self.scenario.workload.output_tokens(self.seed, admit.prompt, sample, admit.attempt, shape.budget)

    def take(self, event: Event) -> None:
        match event:
            case Admit():
                assert event.group == len(self.admits)
                assert event.first == len(self.group_of)
                assert event.attempt == self.prompts[event.prompt] == self.again[event.prompt]
                self.prompts[event.prompt] += 1
                self.admits[event.group] = event
                self.group_of |= dict.fromkeys(range(event.first, event.first + event.launch_n), event.group)
            case Generate():
                for work in event.work:
                    admit = self.admits[self.group_of[work.rollout]]
                    assert work.rollout not in self.home
                    assert work.rollout not in self.done
                    assert admit.group not in self.ends
                    assert (work.prompt, work.attempt) == (admit.prompt, admit.attempt)
                    assert work.sample == work.rollout - admit.first
                    assert work.have == self.tokens[work.rollout] < self.due(work.rollout)
                    self.seen["resumed"] += work.have > 0
                    self.home[work.rollout] = event.id
            case Abort():
                self.fates |= dict.fromkeys(event.rollouts, event.fate)
            case Segment(end="install"):
                assert self.home[event.rollout] == event.by
                assert event.n > 0
                self.tokens[event.rollout] += event.n
                assert self.tokens[event.rollout] < self.due(event.rollout)
                self.seen["lived through"] += 1
            case Segment():
                assert self.home.pop(event.rollout) == event.by
                self.tokens[event.rollout] += event.n
                assert self.tokens[event.rollout] <= self.due(event.rollout) <= self.scenario.shape.budget
                fate = self.fates.pop(event.rollout, None)
                if event.end == "abort":
                    if fate == "restart":
                        self.seen["restarted"] += self.tokens[event.rollout] > 0
                        self.tokens[event.rollout] = 0
                else:
                    assert self.tokens[event.rollout] == self.due(event.rollout)
                    assert (event.end == "length") == (self.due(event.rollout) == self.scenario.shape.budget)
                    self.done.add(event.rollout)
            case Scored():
                assert event.rollout in self.done
                self.scored[event.rollout] += 1
            case Accept():
                assert event.group not in self.accepted
                self.accepted.add(event.group)
            case Reject():
                self.finish(event.group, "rejected", whole=False)
            case Cancel():
                self.finish(event.group, "cancelled", whole=False)
            case Drop():
                self.finish(event.group, "dropped", whole=True)
            case Train():
                for group in event.groups:
                    self.finish(group, "trained", whole=True)
                self.train(event)
            case _:
                pass
        if isinstance(event, Cancel | Drop) and event.requeue:
            self.again[self.admits[event.group].prompt] += 1
            self.seen["requeued"] += 1

    def finish(self, group: int, how: str, whole: bool) -> None:
        assert group in self.admits
        assert group not in self.ends, f"group {group} was {self.ends.get(group)}, and is {how}"
        assert (group in self.accepted) == whole
        self.ends[group] = how

    def train(self, event: Train) -> None:
        names = Counter(self.group_of[r] for r in event.rollouts)
        assert len({*event.rollouts}) == len(event.rollouts)
        assert names == {g: self.admits[g].need_n for g in event.groups}
        for rollout in event.rollouts:
            assert self.tokens[rollout] == self.due(rollout)
            assert self.scored[rollout] == 1

    def close(self) -> None:
        assert not self.home
        assert {*self.ends} == {*self.admits}
        trained = [g for g, how in self.ends.items() if how == "trained"]
        assert len(trained) == self.scenario.shape.steps * self.scenario.shape.B
        assert max(self.scored.values()) == 1


def account(scenario: Scenario, seed: int, events: Iterable[Event]) -> Account:
    """The account of a whole history, closed."""
    opened = Account(scenario, seed)
    for event in events:
        opened.take(event)
    opened.close()
    return opened
