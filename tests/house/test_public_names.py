"""The public names are a contract: adding or removing one is a decision, so it changes this list too."""

from __future__ import annotations

import pytest

import millstream
import millstream.testing

TESTING = ["CRASH", "Crash", "FaultyStore", "Simulated", "TranscriptMismatch", "run_transcript"]
PUBLIC = [
    "EVENT_TIME",
    "WALL_TIME",
    "Adaptive",
    "AllAtOnce",
    "At",
    "Bag",
    "Balance",
    "Batch",
    "Batched",
    "Computation",
    "ConflictError",
    "Control",
    "DamagedObject",
    "Decided",
    "Decision",
    "Dedupe",
    "Fenced",
    "Fluid",
    "ForeachBatch",
    "GiveBack",
    "Handle",
    "Hold",
    "InputBatch",
    "InvariantViolation",
    "Isolate",
    "KeyedStream",
    "Map",
    "Matched",
    "Memory",
    "MillstreamError",
    "Modify",
    "Paced",
    "Parquet",
    "Query",
    "ReplicaFacts",
    "RunningQuery",
    "Scale",
    "SinkError",
    "Status",
    "StepError",
    "StoreUnavailable",
    "Stream",
    "Timer",
    "TimerBatch",
    "UserError",
    "Value",
    "carry",
    "collect",
    "combine",
    "connect",
    "convert",
    "count",
    "drop",
    "first",
    "fresh",
    "last",
    "max",
    "mean",
    "metric",
    "min",
    "session",
    "sessions",
    "sliding",
    "sum",
    "to",
    "tumbling",
]


def test_the_public_names_are_these_and_no_others() -> None:
    assert millstream.__all__ == PUBLIC
    assert millstream.testing.__all__ == TESTING


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name: str) -> None:
    thing = getattr(millstream, name)
    assert thing.__doc__, f"{name} has no docstring"
    assert not thing.__doc__.startswith(f"{name}("), f"{name} has only the docstring that dataclasses make"
