"""The checker: one smallest bad history for each way to break an invariant, each beside a good one that comes close."""

import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from rlsched.checker import INVARIANTS, Checker, check
from rlsched.checker.report import KEPT
from rlsched.commands import (
    Abort,
    Flush,
    Load,
    Offload,
    Pause,
    Resume,
    Sleep,
    Stop,
    Timer,
    Train,
    Transfer,
    Wake,
)
from rlsched.facts import (
    Begin,
    Bucket,
    Done,
    Down,
    End,
    Installed,
    Phase,
    Resident,
    Scored,
    Segment,
    Trained,
    Updating,
)
from rlsched.history import Reader, Writer
from rlsched.notes import Accept, Admit, Cancel, Drop, Go, Publish, Reject, Wait
from rlsched.policy import Policy
from rlsched.shape import Promises
from rlsched.sim.scenario import load
from rlsched.sim.world import World
from rlsched.slots.admit import Barrier, Cap
from rlsched.slots.expire import AgeBound, Never
from rlsched.slots.place import Colocated, Disaggregated
from rlsched.slots.publish import EveryVersion
from rlsched.slots.route import LeastLoaded, RoundRobin
from rlsched.slots.select import FirstFinished, InOrder, OldestFinished

from .histories import RUNS, History, Script, Surplus, crash, histories, report, simulated

Case = Callable[[bool], History]

CASES: list[tuple[str, Case]] = []
"""Histories by the invariant that they break when asked to be bad."""


def breaks(id: str) -> Callable[[Case], Case]:
    def keep(case: Case) -> Case:
        CASES.append((id, case))
        return case

    return keep


def plain(**promises: object) -> Script:
    """Set up, and ready for the first group."""
    return Script(promises=Promises(**promises)).begin()  # type: ignore[arg-type]


# ---- CAUSE


@breaks("CAUSE")
def an_effect_of_no_command(bad: bool) -> History:
    s = plain()
    s.make()
    if bad:
        s.fact(Segment, 7, 0, 0, 0, 1, "stop", 0)
    return s.history


@breaks("CAUSE")
def an_effect_after_the_answer(bad: bool) -> History:
    s = plain()
    s.admit(samples=2)
    s.send(0, 1)
    s.tokens(0)
    if bad:
        s.fact(Done, 1)
    s.tokens(1)
    return s.history


@breaks("CAUSE")
def an_answer_given_twice(bad: bool) -> History:
    s = plain()
    s.do(Pause, 0)
    if bad:
        s.fact(Done, 1, why="once more")
    return s.history


@breaks("CAUSE")
def an_effect_of_another_kind(bad: bool) -> History:
    s = plain()
    s.make()
    id = s.ask(Train, 1, 0, True, [0], [0])
    if bad:
        s.fact(Updating, id, 0, 1)
    return s.history


@breaks("CAUSE")
def an_effect_on_another_engine(bad: bool) -> History:
    s = Script(engines=2).begin()
    s.admit()
    id = s.send(0)
    s.fact(Segment, id, 0, 1 if bad else 0, 0, 4, "stop", 0)
    return s.history


@breaks("CAUSE")
def time_goes_back(bad: bool) -> History:
    s = plain()
    s.do(Pause, 0)
    s.ask(Resume, 0)
    s.events.append(Done(s.now - bad, 2))
    return s.history


@breaks("CAUSE")
def an_id_is_left_out(bad: bool) -> History:
    s = plain()
    s.do(Pause, 0)
    s.ids += bad
    s.do(Resume, 0)
    return s.history


@breaks("CAUSE")
def a_command_before_the_beginning(bad: bool) -> History:
    s = Script()
    if bad:
        s.ask(Pause, 0)
    return s.begin().history


@breaks("CAUSE")
def two_beginnings(bad: bool) -> History:
    s = plain()
    if bad:
        s.fact(Begin)
    return s.history


@breaks("CAUSE")
def an_engine_that_is_down(bad: bool) -> History:
    s = Script(engines=2).begin()
    s.fact(Down, 1)
    s.ask(Pause, 1 if bad else 0)
    return s.history


@breaks("CAUSE")
def a_timer_that_rings_early(bad: bool) -> History:
    s = plain()
    s.do(Timer, s.now + 1 + bad)
    return s.history


# ---- CAP


@breaks("CAP")
def too_many_groups_out(bad: bool) -> History:
    s = Script(steps=3, promises=Promises(eta=1)).begin()
    s.train(1, s.make())
    s.make() if bad else s.out(1, 0)  # one is unpublished, one is buffered
    s.admit(version=int(not bad))
    return s.history


@breaks("CAP")
def too_many_groups_running(bad: bool) -> History:
    s = Script(promises=Promises(concurrency=2)).begin()
    for _ in range(2 + bad):
        s.admit()
    return s.history


@breaks("CAP")
def groups_for_training_count_and_others_do_not(bad: bool) -> History:
    s = Script(promises=Promises(eta=0, concurrency=1)).begin()
    s.admit()
    s.admit(kind="train" if bad else "eval")
    return s.history


# ---- SYNC, ORDER, AGE


@breaks("SYNC")
def a_token_of_an_older_version(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(on_policy=True)).begin()
    s.train(1, s.make())
    if bad:
        s.make()
        s.out(1, 0)
    else:
        s.out(1, 0)
        s.make(version=1)
    s.train(2, 1)
    return s.history


@breaks("SYNC")
def generation_amid_training(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(quiet=True)).begin()
    s.make()
    s.admit()
    if bad:
        s.send(1, prompt=1)
    s.train(1, 0)
    return s.history


@breaks("SYNC")
def generation_before_the_publication(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(quiet=True)).begin()
    s.train(1, s.make())
    if not bad:
        s.out(1, 0)
    s.admit(version=int(not bad))
    s.send(1, prompt=1)
    return s.history


@breaks("SYNC")
def a_batch_that_is_not_whole(bad: bool) -> History:
    s = Script(b=2, promises=Promises(quiet=True, on_policy=True)).begin()
    groups = [s.make(), s.make()]
    s.train(1, *groups[bad:], tokens=8 - 4 * bad)
    return s.history


@breaks("ORDER")
def an_earlier_group_is_passed_over(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(in_order=True)).begin()
    s.make()
    s.make()
    s.train(1, 1 if bad else 0)
    return s.history


@breaks("AGE")
def a_group_that_is_too_old(bad: bool) -> History:
    s = Script(steps=3, promises=Promises(age=1)).begin()
    first, second = s.make(), s.make()
    s.train(1, first)
    s.out(1, 0)
    if bad:
        s.train(2, s.make(version=1))
        s.out(2, 0)
    s.train(2 + bad, second)
    return s.history


# ---- LABEL, WEIGHTS, FLUSH, PAUSE


@breaks("LABEL")
def a_version_that_is_not_installed(bad: bool) -> History:
    s = Script(steps=2).begin()
    s.admit()
    s.send(0)
    s.tokens(0, version=int(bad))
    return s.history


@breaks("LABEL")
def kv_of_an_older_version(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(flush=bad)).begin()
    s.train(1, s.make())
    s.out(1, 0)
    s.admit(version=1)
    s.send(1, prompt=1)
    s.tokens(1, version=1, kv=0)
    return s.history


@breaks("LABEL")
def kv_of_a_newer_version(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    s.tokens(0, kv=int(bad))
    return s.history


def asleep(s: Script, level: int = 2, kv: bool = True) -> None:
    """Put engine 0 to sleep and wake it."""
    id = s.ask(Sleep, 0, level)
    for part in ("weights", "kv"):
        s.fact(Resident, id, 0, "engine", part, 0)
    s.fact(Done, id)
    for part, size in (("weights", 10), ("kv", 20))[: 1 + kv]:
        id = s.ask(Wake, 0, [part])
        s.fact(Resident, id, 0, "engine", part, size)
        s.fact(Done, id)


@breaks("WEIGHTS")
def weights_that_were_thrown_away(bad: bool) -> History:
    s = plain()
    asleep(s, level=2 if bad else 1)
    s.make()
    return s.history


@breaks("FLUSH")
def a_cache_that_was_not_flushed(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(flush=True)).begin()
    s.train(1, s.make())
    s.install(1, 0, flush=not bad)
    s.note(Publish(1, [0]))
    s.make(version=1)
    return s.history


@breaks("FLUSH")
def a_flush_under_requests(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(partial="retract", flush=True)).begin()
    lived(s)
    s.events[-2] = replace(s.events[-2], recompute=not bad)
    return s.history


@breaks("LABEL")
def a_new_request_on_kept_kv(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(partial="keep", flush=True)).begin()
    lived(s, flush=False)
    s.do(Resume, 0)
    if bad:
        s.admit(version=1, prompt=2)
        s.send(2, prompt=2)
    s.tokens(2 if bad else 1, n=3, version=1, kv=0)
    return s.history


@breaks("LABEL")
def a_retracted_request_on_old_kv(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(partial="retract", flush=True)).begin()
    lived(s)
    s.do(Resume, 0)
    s.tokens(1, n=3, version=1, kv=int(not bad))
    return s.history


@breaks("LABEL")
def kv_that_grows_old_again(bad: bool) -> History:
    s = Script(steps=3, promises=Promises(partial="keep", flush=True)).begin()
    lived(s, flush=False)
    s.do(Resume, 0)
    s.train(2, s.make(version=1))
    pause = s.ask(Pause, 0)
    s.tokens(1, n=1, version=1, end="install", kv=1)  # it was preempted, and computed anew
    s.fact(Done, pause)
    s.install(2, 0, flush=False)
    s.do(Resume, 0)
    s.tokens(1, n=1, version=2, kv=int(not bad))
    return s.history


@breaks("PARTIAL")
def a_request_that_lives_through_an_install_under_resume(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(partial="resume" if bad else "keep")).begin()
    lived(s, flush=False)
    return s.history


@breaks("PAUSE")
def a_request_that_lives_through_an_install_without_a_pause(bad: bool) -> History:
    s = Script(promises=Promises(partial="keep")).begin()
    s.admit()
    s.send(0)
    if not bad:
        s.ask(Pause, 0)
    s.tokens(0, end="install")
    return s.history


@breaks("PAUSE")
def a_token_comes_home_from_a_pause(bad: bool) -> History:
    s = Script(steps=2, promises=Promises(partial="keep")).begin()
    lived(s, flush=False)
    s.ask(Abort, 0, [1], "resume")
    s.tokens(1, n=int(bad), version=1, end="abort")
    return s.history


@breaks("BUDGET")
def tokens_that_a_dead_engine_had_told(bad: bool) -> History:
    s = Script(engines=2, steps=2, promises=Promises(partial="keep")).begin()
    lived(s, 0, 1, flush=False)
    s.fact(Down, 0, "it died")
    s.send(1, engine=1, prompt=1, have=3 * bad)
    return s.history


def lived(s: Script, *engines: int, flush: bool = True) -> None:
    """Version 1 is installed while the second group's rollout is inside engine 0 with 3 tokens; it stands still."""
    s.train(1, s.make())
    s.admit()
    s.send(1, prompt=1)
    pauses = [s.ask(Pause, e) for e in engines or (0,)]
    s.tokens(1, n=3, end="install")
    for pause in pauses:
        s.fact(Done, pause)
    s.install(1, *(engines or (0,)), flush=False)
    s.note(Publish(1, [*(engines or (0,))]))
    if flush:
        s.do(Flush, 0, True)


@breaks("PAUSE")
def a_rollout_finishes_under_a_pause(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    s.do(Pause, 0)
    if not bad:
        s.do(Resume, 0)
    s.tokens(0)
    return s.history


@breaks("PAUSE")
def a_resume_of_what_was_not_paused(bad: bool) -> History:
    s = plain()
    if not bad:
        s.do(Pause, 0)
    s.do(Resume, 0)
    return s.history


# ---- PUBLISH, MONO, ATOMIC


@breaks("PUBLISH")
def a_version_that_one_engine_lacks(bad: bool) -> History:
    s = Script(engines=2, steps=2).begin()
    s.train(1, s.make())
    s.install(1, *range(2 - bad))
    s.note(Publish(1, [0, 1]))
    return s.history


@breaks("PUBLISH")
def a_publication_without_a_serving_engine(bad: bool) -> History:
    s = Script(engines=2, steps=2).begin()
    s.train(1, s.make())
    if not bad:
        s.fact(Down, 1)
    s.out(1, 0)
    return s.history


@breaks("PUBLISH")
def an_admission_under_another_version(bad: bool) -> History:
    s = plain()
    s.admit(version=int(bad))
    return s.history


@breaks("PUBLISH")
def an_engine_without_version_0(bad: bool) -> History:
    s = plain()
    if bad:
        s.events = [e for e in s.events if not isinstance(e, Installed)]
    return s.history


@breaks("MONO")
def a_version_is_left_out(bad: bool) -> History:
    s = Script(steps=2).begin()
    s.make()
    s.train(1 + bad, 0)
    return s.history


@breaks("MONO")
def a_batch_is_left_out(bad: bool) -> History:
    s = Script(k=2).begin()
    s.train(1, s.make(), last=False)
    s.train(1, s.make(), index=1 - bad, last=not bad)
    return s.history


@breaks("MONO")
def steps_that_do_not_advance(bad: bool) -> History:
    s = Script(k=2).begin()
    s.train(1, s.make(), last=False)
    s.u -= bad
    s.train(1, s.make(), index=1)
    return s.history


@breaks("MONO")
def a_training_without_its_update(bad: bool) -> History:
    s = plain()
    s.make()
    id = s.ask(Train, 1, 0, True, [0], [0])
    s.fact(Phase, id, "ref" if bad else "update", 5)
    s.fact(Trained, id, 1, 4)
    s.fact(Done, id)
    return s.history


@breaks("MONO")
def a_transfer_of_what_is_not_trained(bad: bool) -> History:
    s = Script(steps=2).begin()
    s.train(1, s.make())
    s.ask(Transfer, 1 + bad, [0], "ipc", 6)
    return s.history


def transfer(s: Script) -> int:
    """Train version 1 and begin to transfer it."""
    s.train(1, s.make())
    return s.ask(Transfer, 1, [0], "ipc", 6)


@breaks("ATOMIC")
def a_token_amid_an_update(bad: bool) -> History:
    s = Script(steps=2).begin()
    s.admit()
    s.send(0)
    s.admit(prompt=1)
    s.send(1, prompt=1)
    s.finish(1)
    s.note(Accept(1))
    s.train(1, 1)
    pause = s.ask(Pause, 0)
    if not bad:
        s.tokens(0, end="install")
    s.fact(Done, pause)
    id = s.ask(Transfer, 1, [0], "ipc", 10)
    s.fact(Updating, id, 0, 1)
    if bad:
        s.tokens(0)
    return s.history


@breaks("ATOMIC")
def two_updates_at_once(bad: bool) -> History:
    s = Script(steps=2).begin()
    id = transfer(s)
    s.fact(Updating, id, 0, 1)
    if bad:
        s.fact(Updating, id, 0, 1)
    return s.history


@breaks("ATOMIC")
def bytes_that_never_came(bad: bool) -> History:
    s = Script(steps=2).begin()
    id = transfer(s)
    s.fact(Updating, id, 0, 1)
    s.fact(Bucket, id, 0, 0, 6)
    if not bad:
        s.fact(Bucket, id, 0, 1, 4)
    s.fact(Installed, id, 0, 1, 10)
    return s.history


@breaks("ATOMIC")
def buckets_out_of_order(bad: bool) -> History:
    s = Script(steps=2).begin()
    id = transfer(s)
    s.fact(Updating, id, 0, 1)
    s.fact(Bucket, id, 0, int(bad), 6)
    return s.history


@breaks("ATOMIC")
def a_transfer_done_too_early(bad: bool) -> History:
    s = Script(engines=2, steps=2).begin()
    s.train(1, s.make())
    s.install(1, 0, 1, flush=False)
    if bad:
        s.events = [e for e in s.events if not (isinstance(e, Installed) and e.by and e.engine == 1)]
    return s.history


# ---- MEM


@breaks("MEM")
def more_than_a_device_holds(bad: bool) -> History:
    s = Script()
    s.fact(Resident, 0, 0, "engine", "weights", 60)
    s.fact(Resident, 0, 0, "engine", "kv", 40 + bad)
    return s.history


@breaks("MEM")
def a_sleep_under_a_request(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    if not bad:
        s.tokens(0)
    s.ask(Sleep, 0, 1)
    return s.history


@breaks("MEM")
def a_token_without_a_cache(bad: bool) -> History:
    s = plain()
    asleep(s, level=1, kv=not bad)
    s.make()
    return s.history


@breaks("MEM")
def an_update_of_sleeping_weights(bad: bool) -> History:
    s = Script(steps=2).begin()
    s.train(1, s.make())
    asleep(s)
    if bad:
        del s.events[-6:]
        s.ids -= 2
    s.ask(Transfer, 1, [0], "ipc", 6)
    return s.history


@breaks("MEM")
def training_on_what_was_offloaded(bad: bool) -> History:
    s = plain()
    s.make()
    for kind, size in ((Offload, 0), (Load, 30))[: 2 - bad]:
        id = s.ask(kind, ["optimizer"])
        s.fact(Resident, id, 1, "trainer", "optimizer", size)
        s.fact(Done, id)
    s.ask(Train, 1, 0, True, [0], [0])
    return s.history


@breaks("MEM")
def a_sleep_that_does_not_say_what_it_left(bad: bool) -> History:
    s = plain()
    id = s.ask(Sleep, 0, 1)
    for part in ("weights", "kv")[bad:]:
        s.fact(Resident, id, 0, "engine", part, 0)
    s.fact(Done, id)
    return s.history


@breaks("MEM")
def a_part_that_did_not_come_back(bad: bool) -> History:
    s = plain()
    asleep(s, kv=False)
    id = s.ask(Wake, 0, ["kv"])
    s.fact(Resident, id, 0, "engine", "kv", 0 if bad else 20)
    s.fact(Done, id)
    return s.history


# ---- ABORT, BUDGET, PARTIAL


@breaks("ABORT")
def an_abort_that_nobody_asked_for(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    if not bad:
        s.ask(Abort, 0, [0], "resume")
    s.tokens(0, n=2, end="abort")
    return s.history


@breaks("ABORT")
def an_abort_that_did_not_wait(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    id = s.ask(Abort, 0, [0], "resume")
    if not bad:
        s.tokens(0, n=0, end="abort")
    s.fact(Done, id)
    return s.history


@breaks("ABORT")
def an_abort_of_what_is_not_there(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    if bad:
        s.tokens(0)
    s.ask(Abort, 0, [0], "resume")
    return s.history


@breaks("ABORT")
def a_needed_rollout_is_cancelled(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    if not bad:
        s.note(Cancel(0, "the run ends"))
    s.ask(Abort, 0, [0], "cancel")
    return s.history


@breaks("BUDGET")
def more_tokens_than_the_budget(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    s.ask(Abort, 0, [0], "resume")
    s.tokens(0, n=6, end="abort")
    s.fact(Done, 2)
    s.fact(Done, 1)
    s.send(0, have=6)
    s.tokens(0, n=2 + bad, end="length")
    return s.history


@breaks("BUDGET")
def a_request_that_counts_wrong(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0, have=int(bad))
    return s.history


def interrupted(fate: str, have: int, **promises: object) -> Script:
    """Abort the rollout of the second group after 3 tokens, install version 1, and send it again."""
    s = Script(steps=2, promises=Promises(**promises)).begin()  # type: ignore[arg-type]
    s.train(1, s.make())
    s.admit()
    s.send(1, prompt=1)
    id = s.ask(Abort, 0, [1], fate)
    s.tokens(1, n=3, end="abort")
    s.fact(Done, s.home[1][0])
    s.fact(Done, id)
    s.out(1, 0)
    s.send(1, prompt=1, have=have)
    s.finish(1, n=2, version=1)
    s.note(Accept(1))
    s.train(2, 1, tokens=2 + have)
    return s


@breaks("PARTIAL")
def two_versions_under_restart(bad: bool) -> History:
    return interrupted("resume" if bad else "restart", 3 if bad else 0, partial="restart").history


@breaks("PARTIAL")
def tokens_that_were_to_be_kept(bad: bool) -> History:
    return interrupted("resume", 0 if bad else 3, partial="resume").history


@breaks("PARTIAL")
def a_restart_under_resume(bad: bool) -> History:
    return interrupted("restart" if bad else "resume", 0 if bad else 3, partial="resume").history


# ---- ONCE, CONS, GROUP


@breaks("ONCE")
def a_group_is_trained_twice(bad: bool) -> History:
    s = Script(steps=2).begin()
    s.train(1, s.make())
    s.make()
    s.train(2, 0 if bad else 1)
    return s.history


@breaks("ONCE")
def two_requests_for_one_rollout(bad: bool) -> History:
    s = Script(engines=2).begin()
    s.admit()
    s.send(0)
    if bad:
        s.send(0, engine=1)
    return s.history


@breaks("ONCE")
def an_ordinal_used_twice(bad: bool) -> History:
    s = plain()
    s.admit()
    s.note(Admit(int(not bad), 1, 0, 1, 1, 1))
    return s.history


@breaks("ONCE")
def a_score_given_twice(bad: bool) -> History:
    s = plain()
    s.admit(samples=2)
    s.send(0, 1)
    s.tokens(0)
    s.tokens(1)
    s.fact(Scored, 0)
    s.fact(Scored, 0, 0.5) if bad else s.fact(Scored, 1)
    return s.history


@breaks("CONS")
def what_was_not_admitted_is_dispatched(bad: bool) -> History:
    s = plain()
    if not bad:
        s.admit()
    s.send(0)
    return s.history


@breaks("CONS")
def a_sample_of_another_prompt(bad: bool) -> History:
    s = plain()
    s.admit(prompt=int(bad))
    s.send(0, prompt=0)
    return s.history


@breaks("CONS")
def an_answer_before_the_last_segment(bad: bool) -> History:
    s = plain()
    s.admit(samples=2)
    id = s.send(0, 1)
    s.tokens(0)
    if not bad:
        s.tokens(1)
    s.fact(Done, id)
    return s.history


@breaks("CONS")
def a_group_without_an_end(bad: bool) -> History:
    s = plain()
    s.train(1, s.make())
    s.admit()
    if not bad:
        s.note(Cancel(1, "the run ends"))
    s.out(1, 0)
    return s.end()


@breaks("CONS")
def a_group_that_ends_twice(bad: bool) -> History:
    s = plain()
    s.make()
    s.note(Drop(0, "old"))
    if bad:
        s.note(Drop(0, "old"))
    return s.history


@breaks("CONS")
def an_attempt_that_nobody_asked_for(bad: bool) -> History:
    s = plain()
    s.make()
    s.note(Drop(0, "old", requeue=not bad))
    s.admit(prompt=0, attempt=1)
    return s.history


@breaks("CONS")
def a_score_before_the_end(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    s.tokens(0, end="install" if bad else "stop")
    s.fact(Scored, 0)
    return s.history


@breaks("GROUP")
def an_accepted_group_that_is_not_whole(bad: bool) -> History:
    s = plain()
    s.admit(samples=2, need=2 if bad else 1)
    s.send(0)
    s.finish(0)
    s.note(Accept(0))
    return s.history


@breaks("GROUP")
def a_batch_without_one_of_its_rollouts(bad: bool) -> History:
    s = plain()
    s.admit(samples=2)
    s.send(0, 1)
    s.tokens(0)
    s.tokens(1)
    s.fact(Scored, 0)
    s.fact(Scored, 1)
    s.note(Accept(0))
    s.ask(Train, 1, 0, True, [0], [0] if bad else [0, 1])
    return s.history


@breaks("GROUP")
def a_rejection_without_a_cause(bad: bool) -> History:
    s = plain()
    s.admit()
    s.send(0)
    s.tokens(0)
    s.fact(Scored, 0, keep=bad)
    s.note(Reject(0, "filtered"))
    return s.history


@breaks("GROUP")
def training_on_an_evaluation(bad: bool) -> History:
    s = plain()
    s.admit(kind="eval" if bad else "train")
    s.send(0)
    s.finish(0)
    s.note(Accept(0))
    s.ask(Train, 1, 0, True, [0], [0])
    return s.history


@breaks("GROUP")
def more_tokens_trained_than_made(bad: bool) -> History:
    s = plain()
    s.train(1, s.make(), tokens=4 + bad)
    return s.history


# ---- LIVE


@breaks("LIVE")
def a_command_without_an_answer(bad: bool) -> History:
    s = plain()
    s.train(1, s.make())
    s.out(1, 0)
    s.ask(Timer, 10**9)
    if bad:
        s.ask(Flush, 0)
    return s.end()


@breaks("LIVE")
def somebody_waits_at_the_end(bad: bool) -> History:
    s = plain()
    s.train(1, s.make())
    s.out(1, 0)
    s.note(Wait("engine" if bad else "trainer", "work"))
    return s.end()


@breaks("LIVE")
def a_wait_within_a_wait(bad: bool) -> History:
    s = plain()
    s.note(Wait("trainer", "groups"))
    if not bad:
        s.note(Go("trainer"))
    s.note(Wait("trainer", "engines"))
    return s.history


@breaks("LIVE")
def a_run_that_failed(bad: bool) -> History:
    s = plain()
    s.train(1, s.make())
    s.out(1, 0)
    if bad:
        s.fact(End, ok=False, why="stalled", stalled=True)
        return s.history
    return s.end()


@breaks("LIVE")
def a_failure_after_a_stop_in_good_order(bad: bool) -> History:
    s = plain()
    s.train(1, s.make())
    s.out(1, 0)
    manifest, events = s.end()
    if bad:
        end = events[-1]
        events[-1] = End(end.t, end.by, ok=False, why="by itself")
    return manifest, events


def test_a_run_that_was_cut_short_is_checked_as_a_prefix() -> None:
    s = plain()
    s.train(1, s.make())
    s.fact(End, ok=False, why="engine-0 died")
    found = report(s.history)
    assert found.ok
    assert found.failed == "engine-0 died"


@breaks("LIVE")
def a_stop_without_an_end(bad: bool) -> History:
    s = plain()
    if bad:
        s.ask(Stop)
    return s.history


@breaks("LIVE")
def a_failure_that_nobody_heeds(bad: bool) -> History:
    s = plain()
    id = s.ask(Flush, 0)
    s.fact(Done, id, ok=False, why="requests hold blocks")
    s.ask(Flush, 0) if bad else s.ask(Stop, "requests hold blocks")
    if not bad:
        s.fact(End, 2, ok=False, why="requests hold blocks")
        s.events = s.events[:-2]
    return s.history


@breaks("LIVE")
def a_version_that_never_came_out(bad: bool) -> History:
    s = Script(steps=1 + bad).begin()
    s.train(1, s.make())
    s.out(1, 0)
    return s.end()


@breaks("REPLICA")
def a_request_to_an_engine_that_lags(bad: bool) -> History:
    s = Script(promises=Promises(skew=0 if bad else 1), engines=2, steps=2).begin()
    s.train(1, s.make())
    s.out(1, 0)
    s.admit(version=1)
    s.send(1, engine=1, prompt=1)
    return s.history


@pytest.mark.parametrize(("id", "case"), CASES, ids=[f"{id}: {case.__name__}" for id, case in CASES])
def test_only_the_bad_history_is_reported(id: str, case: Case) -> None:
    good, bad = report(case(False)), report(case(True))
    assert good.ok, good.violations[0]
    assert id in bad.counts, bad.counts
    lines = {n: msgspec.json.encode(e).decode() for n, e in enumerate(case(True)[1], start=2)}
    for violation in bad.violations:
        assert violation.witness
        assert all(lines[w.line] == w.text for w in violation.witness)


def test_every_invariant_has_a_case() -> None:
    assert {id for id, _ in CASES} == INVARIANTS.keys()


# ---- histories that are right


def test_a_straggler_may_be_older_than_eta() -> None:
    """The cap bounds a count: one group is passed over twice under η = 1 (AReaL#602)."""
    s = Script(steps=3, promises=Promises(eta=1, concurrency=2, flush=True, partial="resume")).begin()
    s.admit()
    s.send(0)
    for version in (1, 2):
        group = s.make(version=version - 1)
        s.train(version, group)
        id = s.ask(Abort, 0, [0], "resume")
        s.tokens(0, n=2, version=version - 1, end="abort")
        s.fact(Done, s.home[0][0])
        s.fact(Done, id)
        s.out(version, 0)
        s.send(0, have=2 * version)
    s.finish(0, n=2, version=2)
    s.note(Accept(0))
    s.train(3, 0, tokens=6)
    s.out(3, 0)
    found = report(s.end())
    assert found.ok, found.violations[0]


def test_a_request_may_live_through_an_update_on_its_own_kv() -> None:
    """Kept requests mix versions, and stand on older KV (vllm#32351, vllm#46125)."""
    s = Script(steps=2, promises=Promises(eta=1)).begin()
    s.train(1, s.make())
    s.admit()
    s.send(1, prompt=1)
    pause = s.ask(Pause, 0)
    s.tokens(1, n=3, end="install")
    s.fact(Done, pause)
    s.install(1, 0, flush=False)
    s.note(Publish(1, [0]))
    s.do(Resume, 0)
    s.finish(1, n=3, version=1)
    s.events[-3] = replace(s.events[-3], kv_from=0)
    s.note(Accept(1))
    s.train(2, 1, tokens=6)
    s.out(2, 0)
    found = report(s.end())
    assert found.ok, found.violations[0]


def test_a_sleep_is_as_good_as_a_flush() -> None:
    """The cache was slept away before the update (lmdeploy#4917)."""
    s = Script(steps=2, promises=Promises(flush=True)).begin()
    s.make()
    asleep(s, kv=False)
    s.train(1, 0)
    s.install(1, 0, flush=False)
    s.note(Publish(1, [0]))
    id = s.ask(Wake, 0, ["kv"])
    s.fact(Resident, id, 0, "engine", "kv", 20)
    s.fact(Done, id)
    s.make(version=1)
    found = report(s.history)
    assert found.ok, found.violations[0]


def test_rejected_groups_give_their_place_back() -> None:
    """More groups are admitted than (η+1)·B, never more than that at once (AReaL#339)."""
    s = Script(promises=Promises(eta=0, concurrency=1)).begin()
    for group in range(3):
        s.admit()
        s.send(group, prompt=group)
        s.tokens(group)
        s.fact(Done, s.home[group][0])
        s.fact(Scored, group, keep=False)
        s.note(Reject(group, "filtered"))
    found = report(s.history)
    assert found.ok, found.violations[0]


def test_late_news_of_a_group_that_is_over() -> None:
    """A rollout may finish though its abort is on its way, and be scored when nobody asks any more."""
    s = plain()
    s.admit(samples=2, need=1)
    s.send(0, 1)
    s.tokens(0)
    s.fact(Scored, 0)
    s.note(Accept(0))
    id = s.ask(Abort, 0, [1], "cancel")
    s.note(Drop(0, "old"))
    s.tokens(1)
    s.fact(Done, 1)
    s.fact(Done, id)
    s.fact(Scored, 1)
    found = report(s.history)
    assert found.ok, found.violations[0]


def test_an_engine_may_go_down() -> None:
    found = report(crash())
    assert found.ok, found.violations[0]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", RUNS)
def test_simulated_runs_are_right(name: str, seed: int) -> None:
    found = report(simulated(name, seed))
    assert found.ok, found.violations[0]


@pytest.mark.parametrize("seed", range(40))
def test_any_policy_keeps_its_promises(seed: int) -> None:
    """Slots put together by chance: whatever comes out, the checker and the policy agree about it."""
    pick = Random(seed).choice
    eta = pick([0, 1, 2, 4])
    apart = [Disaggregated(), Disaggregated(trainers=2)]
    place = pick([Colocated(), Colocated(sleep=1), Colocated(offload=()), *apart])
    fate = pick(["drain", "resume", "restart", *(("retract", "keep") if place in apart else ())])
    policy = Policy(
        "any",
        pick([Cap(eta=eta), Cap(eta=eta, C=3), Surplus(eta=eta), Barrier()]),
        pick([InOrder(), InOrder(whole=True), OldestFinished(), FirstFinished()]),
        pick([Never(), AgeBound(bound=0, requeue=True), AgeBound(bound=1)]),
        EveryVersion(fate=fate, flush=fate == "retract" or pick([True, False])),  # type: ignore[arg-type]
        place,
        pick([RoundRobin(), LeastLoaded()]),
    )
    changes = ["shape.steps=4", "shape.budget=300", f"shape.b={pick([1, 2, 5])}", f"shape.k={pick([1, 2])}"]
    changes += [f"shape.samples={pick([1, 3])}", f"shape.engines={pick([1, 3])}", f"workload.reward_s={pick([0, 2.5])}"]
    changes += [f"workload.reject={pick([0, 0.2])}", f"control.abort_s={pick([0, 0.4])}"]
    events: list[Any] = []
    world = World(load(None, changes), policy, seed, events.append)
    world.run()
    found = report((world.manifest, events))
    assert found.ok, found.violations[0]


@pytest.mark.parametrize("name", RUNS)
def test_every_prefix_of_a_right_history_is_right(name: str) -> None:
    manifest, events = simulated(name)
    checker = Checker(manifest)
    for line, event in enumerate(events[:-2], start=2):
        checker.feed(line, event)
        assert checker.report.ok
    assert checker.close(open=True).ok


# ---- the report


def test_a_file_is_checked_whole_or_as_far_as_it_goes(tmp_path: Path) -> None:
    manifest, events = simulated("areal")
    for name, kept in (("whole.jsonl.zst", events), ("open.jsonl", events[:-40])):
        with Writer(tmp_path / name) as writer:
            writer.begin(manifest)
            for event in kept:
                writer.write(event)
        found = check(Reader(tmp_path / name))
        assert found.ok, found.violations[0]
        assert (found.events, found.open) == (len(kept), len(kept) < len(events))


def test_violations_beyond_the_limit_are_counted() -> None:
    s = plain()
    for _ in range(KEPT + 5):
        s.fact(Done, 99 + _)
    found = report(s.history)
    assert found.counts == {"CAUSE": KEPT + 5}
    assert len(found.violations) == KEPT
    assert not found.ok


def test_a_violation_says_where_and_what() -> None:
    (violation,) = report(too_many_groups_running(True)).violations
    assert violation.statement == "admitting group 2 makes 3 running, over C = 2"
    assert [w.line for w in violation.witness] == [8, 9, 10]
    assert str(violation).splitlines()[1].strip() == f"line 8: {violation.witness[0].text}"


def test_a_closed_history_without_an_end_is_none() -> None:
    found = report(plain().history, open=False)
    assert found.counts == {"LIVE": 1}


def test_nothing_comes_after_the_end() -> None:
    s = plain()
    s.train(1, s.make())
    s.out(1, 0)
    s.end()
    s.fact(Done, 99)
    assert report(s.history, open=False).counts == {"LIVE": 1, "CAUSE": 1}


def test_an_unknown_kind_of_event_is_refused() -> None:
    with pytest.raises(KeyError):
        Checker(plain().manifest).feed(2, msgspec.Raw())  # type: ignore[arg-type]


def test_what_is_over_is_forgotten() -> None:
    checker = Checker(simulated("verl")[0])
    most = 0
    for line, event in enumerate(simulated("verl")[1], start=2):
        checker.feed(line, event)
        state = checker._state
        most = max(most, len(state.groups) + len(state.rollouts) + len(state.open))
    shape = checker._state.manifest.shape
    assert 0 < most <= shape.B * (2 + shape.samples) + 10
    assert not state.groups
    assert not state.rollouts
    assert not state.open


def test_100_000_events_a_second() -> None:
    """Measured: over 400,000 on one core of 2023."""
    total = best = 0.0
    for _, history in histories():
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            report(history)
            times.append(time.perf_counter() - begin)
        total += len(history[1])
        best += min(times)
    assert total / best > 100_000
