"""Steps that would take updates for new facts are refused when the graph is built, with both names and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

import millstream as ms
from millstream.errors import UserError
from millstream.testing import Simulated

MINUTE = ms.tumbling("1 minute")
SCHEMA = {"s": "k long, g long, x long, ts timestamp"}


class Latest(ms.Computation):
    """Keeps the latest row of each key, and passes on what it has grown by."""

    last = ms.Value("long", default=0)
    output = "k long, g long, more long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        yield row.k, row.k % 2, row.n - self.last.get()
        self.last.set(row.n)


def build() -> tuple[ms.Query, ms.KeyedStream]:
    query = ms.Query("q")
    return query, query.source("s", None, event_time="ts").key_by("k")


UPDATING: dict[str, Callable[[ms.KeyedStream], ms.Stream]] = {
    "counts": lambda keyed: keyed.count("made"),
    "totals": lambda keyed: keyed.aggregate("made", count=ms.sum("x")),
    "dead letters": lambda keyed: keyed.aggregate("made", on_error="dead_letter", count=ms.sum("x")),
    "early tumbling": lambda keyed: keyed.window(MINUTE).count("made", early=True),
    "early sliding": lambda keyed: keyed.window(ms.sliding("2 minutes", every="1 minute")).count("made", early=True),
    "early sessions": lambda keyed: keyed.window(ms.sessions("1 minute")).count("made", early=True),
    "ranks": lambda keyed: keyed.top_n("made", 2, by="x"),
}
TAKING: dict[str, Callable[[ms.Stream], Any]] = {
    "a count": lambda stream: stream.key_by("k").count("taken"),
    "a sum": lambda stream: stream.key_by("k").aggregate("taken", total=ms.sum("k")),
    "a window": lambda stream: stream.key_by("k").window(MINUTE).count("taken"),
    "sliding windows": lambda s: s.key_by("k").window(ms.sliding("2 minutes", every="1 minute")).count("taken"),
    "sessions": lambda stream: stream.key_by("k").window(ms.sessions("1 minute")).count("taken"),
    "a top-n": lambda stream: stream.key_by("k").top_n("taken", 3, by="made"),
    "a join on the left": lambda s: s.key_by("k").join("taken", s.query.source("o", None).key_by("k")),
    "a join on the right": lambda s: s.query.source("o", None).key_by("k").join("taken", s.key_by("k")),
}


@pytest.mark.parametrize("taking", TAKING)
@pytest.mark.parametrize("making", UPDATING)
def test_updates_are_not_taken_for_facts(making: str, taking: str) -> None:
    _, keyed = build()
    with pytest.raises(UserError, match=r"step 'taken' would take the updates of step 'made' for new facts"):
        TAKING[taking](UPDATING[making](keyed))


def test_the_refusal_says_what_would_be_wrong_and_what_to_do() -> None:
    _, keyed = build()
    with pytest.raises(UserError) as refused:
        keyed.count("counts").key_by("k").aggregate("sums", total=ms.sum("count"))
    text = str(refused.value)
    assert "a sum over the counts 1, 2 and 3 of a key would be 6, not 3" in text
    assert "aggregate within windows" in text
    assert "put a computation of your own between 'counts' and 'sums'" in text
    with pytest.raises(UserError, match="without early=True or behind stream.filter"):
        keyed.window(MINUTE).count("early", early=True).key_by("k").count("counted")


def test_updates_stay_updates_through_maps_and_unions() -> None:
    query, keyed = build()
    counts = keyed.count("counts")
    other = query.source("t", None).map_batches("same", lambda rows: rows, output="k long, count long")
    mapped = counts.map_batches("renamed", lambda rows: rows, output="k long, count long")
    for stream in (mapped, other.union(counts), counts.filter("large", lambda rows: rows)):
        with pytest.raises(UserError, match="updates of step 'counts'"):
            stream.key_by("k").count("taken")
    early = keyed.window(MINUTE).count("early", early=True).map_batches("a", lambda r: r, output="k long, count long")
    mixed = counts.map_batches("b", lambda r: r, output="k long, count long")
    for number, stream in enumerate((early.union(mixed), mixed.union(early))):
        with pytest.raises(UserError, match="updates of step 'counts'"):
            stream.filter(f"final{number}", lambda rows: rows).key_by("k").count("taken")
    assert "taken-partial" not in query.maps, "what is refused leaves nothing behind"


def test_windows_that_have_closed_are_facts() -> None:
    _, keyed = build()
    keyed.window(MINUTE).count("minutes").key_by("k").window(ms.tumbling("1 hour")).count("hours")
    early = keyed.window(MINUTE).count("early", early=True)
    early.filter("final", lambda rows: rows["final"]).key_by("k").count("finals")


def test_late_records_and_dead_letters_of_an_aggregate_are_facts() -> None:
    _, keyed = build()
    made = keyed.window(MINUTE).aggregate("w", early=True, late="output", on_error="dead_letter", n=ms.count())
    made.output("late").key_by("k").count("late_ones")
    made.output("dead_letter").key_by("key").count("dead_ones")


def test_a_computation_of_the_user_is_trusted() -> None:
    query, keyed = build()
    counts = keyed.aggregate("counts", n=ms.count())
    latest = counts.key_by("k").compute("latest", Latest)
    latest.key_by("g").aggregate("by_parity", total=ms.sum("more")).sink("out", ms.Memory())
    sim = Simulated(query, SCHEMA)
    for _ in range(3):
        sim.feed(s=[(k, 0, 0, None) for k in (1, 2, 3, 3)])
    assert dict(sim.outputs("out")[-2:]) == {0: 3, 1: 9}
    assert dict(sim.state("by_parity")) == {0: {"total": 3}, 1: {"total": 9}}


def test_a_modification_that_would_take_updates_for_facts_is_refused() -> None:
    query, keyed = build()
    made = keyed.window(MINUTE).count("made")
    made.key_by("k").window(ms.tumbling("1 hour")).count("hours")
    sim = Simulated(query, SCHEMA)
    sim.feed()
    change = sim.modify()
    with pytest.raises(UserError, match="would take the updates"):
        change.stream("made").key_by("k").count("x").key_by("k").count("y")
