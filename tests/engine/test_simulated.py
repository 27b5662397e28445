"""What is wrong with a call of the simulator is said at once, and in its own words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import millstream as ms
from jobs import two_steps
from millstream.testing import Simulated


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (
            lambda sim: sim.feed(events=[{"user": "a", "amount": 1}]),
            "found the record {'user': 'a', 'amount': 1}, expected",
        ),
        (lambda sim: sim.feed(events=["ab"]), "found the record 'ab', expected a tuple of user, amount"),
        (
            lambda sim: sim.feed(events=[("a", 1), ("b",)]),
            r"found the record \('b',\), expected a tuple of user, amount",
        ),
        (lambda sim: sim.feed(event=[("a", 1)]), "no source 'event'; the query has events"),
        (lambda sim: sim.outputs("out"), "no sink 'out'; the query has records_out, batches_out"),
        (lambda sim: sim.state("record"), "no step 'record'; the query has records, batches"),
        (lambda sim: sim.state("records", "sum"), "step 'records' has no state 'sum'; it has total, last"),
        (lambda sim: sim.watermark("user"), "no source or step 'user'; the query has events, records, batches"),
    ],
)
def test_what_does_not_fit_the_query_is_refused_by_name(call: Callable[[Simulated], Any], match: str) -> None:
    simulated = Simulated(two_steps(), {"events": "user string, amount long"})
    with pytest.raises(ms.UserError, match=match):
        call(simulated)
    assert simulated.epoch == -1
