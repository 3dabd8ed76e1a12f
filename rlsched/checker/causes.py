"""Causes and answers: CAUSE. Which command a fact names, and whether it can be the fact's cause."""

from typing import Any

from ..commands import Command
from .report import Seen
from .state import Engine, Order, State


def issue(state: State, line: int, command: Any) -> Order:
    """Take note of a command; ids count 1, 2, 3 and nothing is wanted before Begin or after Stop."""
    order = Order(Seen(line, command), command)
    if command.id != state.commands + 1:
        state.broken("CAUSE", f"command {command.id} follows {state.commands}: ids count up by one", order.seen)
    state.commands = max(state.commands, command.id)
    state.open[command.id] = order
    if state.begun is None:
        state.broken("CAUSE", f"command {command.id} was issued before Begin", order.seen)
    return order


def cause(state: State, line: int, fact: Any, *kinds: type[Command]) -> Order | None:
    """The unanswered command of one of ``kinds`` that ``fact`` names; None, and reported, if there is none."""
    order = state.open.get(fact.by)
    if order is None:
        why = "was answered already" if 0 < fact.by <= state.commands else "was never issued"
        what = "the set-up is over" if fact.by == 0 else f"command {fact.by} {why}"
        state.broken("CAUSE", f"{_name(fact)} by {fact.by}: {what}", Seen(line, fact))
        return None
    if type(order.event) not in kinds:
        can = " or ".join(_name(k) for k in kinds)
        text = f"{_name(fact)} by {fact.by}, which is a {_name(order.event)}: only {can} has this effect"
        state.broken("CAUSE", text, order.seen, Seen(line, fact))
        return None
    return order


def about(state: State, order: Order, engine: int) -> Engine | None:
    """The engine that a command is about; None, and reported, if there is none that is up."""
    found = state.engines.get(engine)
    if found is None:
        state.broken("CAUSE", f"command {order.event.id} is about engine {engine}, which isn't there", order.seen)
    elif not found.up:
        state.broken("CAUSE", f"command {order.event.id} is about engine {engine}, which is down", order.seen)
        return None
    return found


def _name(event: Any) -> str:
    return (event if isinstance(event, type) else type(event)).__name__
