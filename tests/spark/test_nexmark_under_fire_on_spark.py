"""Every stateful query of NEXMark on Spark while random migrations go on and its driver dies in the middle of one.

The same random commands as in the simulator's schedules. `MILLSTREAM_SEED` gives others; a failure names its seed.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import millstream as ms
from migrations import random_plan, random_strategy
from millstream.engine.driver import MOMENTS
from millstream.nexmark import QUERIES, NexmarkQuery, Parameters
from millstream.nexmark.frames import closed_loop
from millstream.protocol.epochs import History

pytestmark = [pytest.mark.spark, pytest.mark.slow]

EPOCHS, PER_EPOCH = 6, 150
SPANS = {"q5": 3 * 3600, "q8": 72 * 3600, "nbq5": 200, "nbq8": 72 * 3600, "nbqx": 36 * 3600}
STATEFUL = [query for query in QUERIES.values() if query.is_stateful]


class Killed(Exception):
    """Ends a driver where it stands."""


class Fire:
    """Commands something after every epoch, and ends the driver once."""

    def __init__(self, store: Path, rng: random.Random) -> None:
        self.store, self.rng = store, rng
        self.dies = (rng.choice(MOMENTS), rng.randint(2, EPOCHS - 2))
        self.sent = 0

    def observe(self, moment: str, epoch: int) -> None:
        if moment == "committed" and epoch < EPOCHS - 1:
            self.command(epoch)
        if (moment, epoch) == self.dies:
            self.dies = ("", -1)
            raise Killed

    def command(self, epoch: int) -> None:
        control, rng = ms.connect(str(self.store)), self.rng
        history: History = control._look()
        layout = control._layout(history)
        if epoch == 0:
            slots = rng.choice([count for count in range(1, 5) if count != len(layout.owners)])
            control.apply(control.plan_rescale(slots, strategy=random_strategy(rng)))
        elif rng.random() < 0.15:
            control.cancel(rng.randrange(self.sent))
        else:
            plan = random_plan(layout, epoch, rng, most_slots=4)
            if plan is None or not plan.rounds:
                return
            control.apply(plan)
        self.sent += 1


@pytest.mark.parametrize("number", [0, 1] if os.environ.get("MILLSTREAM_KILLED") == "all" else [0])
@pytest.mark.parametrize("query", STATEFUL, ids=lambda query: query.name)
def test_a_query_on_spark_gives_what_plain_python_gives_whatever_moves_and_dies(
    query: NexmarkQuery, number: int, spark: SparkSession, tmp_path: Path, seed: int
) -> None:
    rng, sink = random.Random(f"{seed + number} {query.name}"), ms.Memory()
    more = 1 if "bids" in query.reads else 10  # of the others, people and auctions are few among all events
    events, span = EPOCHS * PER_EPOCH * more, SPANS.get(query.name, 600)
    given = Parameters(
        events=events, events_per_second=events, dilation=span, group=30, delayed=10, delay_us=span * 20_000
    )
    expected = Counter(query.expected(given))
    assert expected, "nothing would be shown"
    fire = Fire(tmp_path / "store", rng)
    for _ in range(2):
        origins = {kind: closed_loop(given, kind, PER_EPOCH * more) for kind in query.reads}
        running = query.build(origins, sink).start(
            spark, str(fire.store), slots=rng.randint(1, 3), bins=16, observe=fire.observe
        )
        with suppress(Killed):
            running.wait_epoch(EPOCHS - 1, timeout=180)
            break
    running.stop()
    assert fire.dies == ("", -1), "nothing was killed"
    outcomes = running.commands()
    print([(outcome.verb, outcome.state, outcome.done) for outcome in outcomes])
    assert any(outcome.done and outcome.began < EPOCHS - 1 for outcome in outcomes), "nothing has moved mid-stream"
    refused = [outcome for outcome in outcomes if outcome.state == "refused" and outcome.verb != "cancel"]
    assert all(outcome.stale or "which is past" in outcome.reason for outcome in refused)
    assert Counter(tuple(row.values()) for row in sink.rows()) == expected
