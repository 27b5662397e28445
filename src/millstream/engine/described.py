"""A step as the journal describes it, for readers of state who do not have the query's code.

Rules
-----
- All that reading needs is in the description that plans carry (`Graph.describe`): the key's columns, and what each
  state is stored as. User code is neither needed nor run.
- What is made from a description describes itself in the same words.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.bags import Bag
from millstream.model.computation import Computation
from millstream.model.graph import Graph, Input, Step
from millstream.model.kinds import State
from millstream.model.maps import Map
from millstream.model.query import ONLY_INPUT
from millstream.model.state import Value
from millstream.model.times import EVENT_TIME
from millstream.model.types import parse_type

_SCALAR = r"INTERVAL DAY TO SECOND|\S+"
_KEY = re.compile(rf"(.*?) ({_SCALAR})", re.DOTALL)
_MAP = re.compile(rf"MAP ({_SCALAR}) (.*)")
_NO_STATE = re.compile(r"TIMER .*|HOLD")


def described_graph(description: Mapping[str, Any]) -> Graph:
    """The steps of a description, with their keys and states, and nothing else."""
    steps = tuple(_step(name, told) for name, told in description["steps"].items())
    return Graph(description["query"], (), steps, (), (), {})


def _step(name: str, told: Mapping[str, Any]) -> Step:
    texts = told["key"] if "key" in told else next(iter(told["inputs"].values()))["key"]
    columns = [_matched(_KEY, text) for text in texts]
    schema = pa.schema([pa.field(column, parse_type(kind)) for column, kind in columns])
    given = Input(ONLY_INPUT, "", schema, tuple(column for column, _ in columns))
    states = {state: _state(state, text) for state, text in told["state"].items() if _NO_STATE.fullmatch(text) is None}
    return Step(name, 1, (given,), Computation(), states, {})


def _state(name: str, text: str) -> State:
    by_event = text.endswith(" TTL EVENT")
    kind = text.removesuffix(" TTL EVENT").removesuffix(" NOT NULL")
    state: State
    if kind.startswith("MAP "):
        state = Map(*_matched(_MAP, kind))
    elif kind.startswith("BAG "):
        state = Bag(kind.removeprefix("BAG "))
    else:
        state = Value(kind)
    state.name = name
    if by_event:
        state.ttl_time = EVENT_TIME
    return state


def _matched(pattern: re.Pattern[str], text: str) -> tuple[str, str]:
    found = pattern.fullmatch(text)
    if found is None:
        raise UserError(f"the journal describes a step with {text!r}, which this release cannot read; use a newer one")
    return found[1], found[2]
