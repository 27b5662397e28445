"""State as data: reading all of a step's state, as of an epoch.

Rules
-----
- Reads what lookups would find: of each key the newest value, tombstones left out (G1).
- Values are shown in the form that is current now, whatever epoch is asked for.
- Works range by range, so that the memory it takes is bounded by a part of the state, not by all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.graph import Graph, Step
from millstream.model.times import EVENT_TIME
from millstream.protocol.epochs import History
from millstream.protocol.keyspace import LAST, Range, clip
from millstream.protocol.manifest import Family, Piece
from millstream.protocol.time import NO_TIME
from millstream.store.forms import NO_FORMS, Forms
from millstream.store.merge import newest_rows
from millstream.store.objects import ObjectStore
from millstream.store.segments import CACHE

PART_BYTES = 64 << 20
"""About how much is read at a time."""


def state_schema(step: Step, state: str) -> pa.Schema:
    """The key's columns, the subkey of a map (or the epoch of what a bag holds), and the value, named as declared; a
    state that is called like a column of the key has its values in `<name>_value`."""
    declared = step.states[state]
    fields = [pa.field(name, kind) for name, kind in zip(step.key, step.key_types, strict=True)]
    if declared.subkey_type is not None:
        fields.append(pa.field(declared.subkey_column, declared.subkey_type))
    value = f"{state}_value" if state in step.key else state
    return pa.schema([*fields, pa.field(value, declared.stored_type)])


def now_of(step: Step, state: str, history: History) -> int | None:
    """The time by which values of a state have expired, as of a history; None for what is no state. One without a
    time-to-live may have had one."""
    declared = step.states.get(state)
    if declared is None:
        return None
    if declared.ttl_time == EVENT_TIME:
        return history.watermarks.get(step.name, NO_TIME)
    return history.clock_ms * 1000


def parts_of(pieces: Sequence[Piece], part_bytes: int = PART_BYTES) -> list[tuple[Range, list[Piece]]]:
    """Ranges that cover the key space, and the pieces of each, so that each holds about `part_bytes`."""
    count = max(1, -(-sum(piece.bytes for piece in pieces) // part_bytes))
    edges = [(LAST + 1) * part // count for part in range(count + 1)]
    parts = []
    for first, end in pairwise(edges):
        span = Range(first, end - 1)
        inside = [Piece(p.segment, clip(p.ranges, [span])) for p in pieces if clip(p.ranges, [span])]
        if inside:
            parts.append((span, inside))
    return parts


def read_part(
    store: ObjectStore,
    schema: pa.Schema,
    span: Range,
    pieces: Sequence[Piece],
    now: int | None = None,
    forms: Forms = NO_FORMS,
) -> pa.RecordBatch:
    """The state in one range, without what has expired by `now`."""
    rows = newest_rows(store, CACHE, pieces, [span], drop_dead=True, now=now, forms=forms)
    return pa.RecordBatch.from_arrays([*rows.keys.columns, rows.values], schema=schema)


def read_state(store: ObjectStore, step: Step, state: str, history: History, forms: Forms = NO_FORMS) -> pa.Table:
    """All state of one declaration as of a history, in hash order."""
    schema, now = state_schema(step, state), now_of(step, state, history)

    def batches() -> Iterator[pa.RecordBatch]:
        for span, pieces in parts_of(history.manifest.pieces(Family(step.name, state))):
            yield read_part(store, schema, span, pieces, now, forms)

    return pa.Table.from_batches(batches(), schema=schema)


def chosen_state(graph: Graph, step: str, state: str | None) -> tuple[Step, str]:
    """The step and the state that are meant."""
    chosen = next((item for item in graph.steps if item.name == step), None)
    if chosen is None:
        raise UserError(f"no step {step!r}; the query has {', '.join(item.name for item in graph.steps)}")
    if not chosen.states:
        raise UserError(f"step {step!r} declares no state")
    if state is None and len(chosen.states) > 1:
        raise UserError(f"step {step!r} declares several states: say which of {', '.join(chosen.states)}")
    name = state or next(iter(chosen.states))
    if name not in chosen.states:
        raise UserError(f"step {step!r} declares no state {name!r}; it has {', '.join(chosen.states)}")
    return chosen, name


def check_same_step(step: Step, history: History) -> None:
    """Refuses to read the state of an epoch in which the step was another one, or called otherwise."""
    known = (history.graph or {}).get("steps", {})
    if known.get(step.name) != step.describe():
        raise UserError(
            f"step {step.name!r} was another one at epoch {history.epoch}, before the query was modified; its state of "
            "that time cannot be read any more"
        )
