"""Transcripts: those in tests/transcripts, and what a wrong one says."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest

import millstream as ms
from millstream.errors import UserError
from millstream.model.query import Query
from millstream.testing import TranscriptMismatch, run_transcript

FOLDER = Path(__file__).parent.parent / "transcripts"


class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


def word_count() -> Query:
    query = ms.Query("words")
    query.source("words", None).key_by("word").compute("count", Count).sink("counts", ms.Memory())
    return query


class Visit(ms.Computation):
    pages = ms.Value("array<string>", default=[])
    silence = ms.Timer(ms.EVENT_TIME)
    forget = ms.Timer(ms.WALL_TIME)
    output = "customer string, pages array<string>, ended timestamp"
    outputs: ClassVar = {"forgotten": "customer string"}

    def on_record(self, row: Any, at: ms.At) -> None:
        self.pages.set([*self.pages.get(), row.page])
        self.silence.set(timedelta(minutes=30))
        self.forget.set(timedelta(days=1))

    @silence.fires
    def ended(self, at: ms.At) -> Iterable[Any]:
        yield at.key, self.pages.get(), at.time
        self.pages.delete()

    @forget.fires
    def forgotten(self, at: ms.At) -> Iterable[Any]:
        yield ms.to("forgotten", at.key)


def sessions() -> Query:
    query = ms.Query("sessions")
    clicks = query.source("clicks", None, event_time="ts", lateness="5 minutes")
    visit = clicks.key_by("customer").compute("visit", Visit)
    visit.sink("visits", ms.Memory())
    visit.output("forgotten").sink("forgotten", ms.Memory())
    return query


class Hottest(ms.Computation):
    degrees = ms.Value("double", default=float("-inf"))
    output = "sensor long, degrees double"

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        if row.degrees > self.degrees.get():
            self.degrees.set(row.degrees)
            yield at.key, row.degrees


def late() -> Query:
    query = ms.Query("late")
    readings = query.source("readings", None, event_time="ts", lateness="2 minutes")
    hottest = readings.key_by("sensor").compute("hottest", Hottest, late="output")
    hottest.sink("maxima", ms.Memory())
    hottest.output("late").sink("too_late", ms.Memory())
    return query


class Ledger(ms.Computation):
    spent = ms.Value("decimal(12, 2)")
    paid = ms.Value("decimal(12, 2)")
    output = "customer string, owes decimal(12, 2)"
    outputs: ClassVar = {"large": "customer string, amount decimal(10, 2)"}

    def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
        known = self.spent if at.input == "orders" else self.paid
        known.set((known.get() or 0) + row.amount)
        yield at.key, (self.spent.get() or 0) - (self.paid.get() or 0)
        if at.input == "orders" and row.amount > 100:
            yield ms.to("large", at.key, row.amount)


def ledger() -> Query:
    query = ms.Query("ledger")
    orders, payments = query.source("orders", None), query.source("payments", None)
    stream = query.compute("ledger", Ledger, orders=orders.key_by("customer"), payments=payments.key_by("customer"))
    stream.sink("owed", ms.Memory())
    stream.output("large").sink("large", ms.Memory())
    return query


QUERIES: dict[str, Callable[[], Query]] = {
    "word_count": word_count,
    "sessions": sessions,
    "late": late,
    "ledger": ledger,
    "crashes": word_count,
}


def test_every_transcript_is_run() -> None:
    assert sorted(path.stem for path in FOLDER.glob("*.txt")) == sorted(QUERIES)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", QUERIES)
def test_a_query_does_what_its_transcript_says(name: str, slots: int) -> None:
    update = bool(os.environ.get("MILLSTREAM_UPDATE_TRANSCRIPTS"))
    run_transcript(QUERIES[name](), FOLDER / f"{name}.txt", update=update, slots=slots)


# -- what a wrong one says ----------------------------------------------------------------------------------------

HEAD = "source words: word string\n"


def run(tmp_path: Path, text: str, query: Query | None = None, **options: Any) -> str:
    """Runs a transcript from a file; its text afterwards."""
    path = tmp_path / "t.txt"
    path.write_text(text)
    run_transcript(query or word_count(), path, **options)
    return path.read_text()


def test_a_difference_is_shown_with_its_line_side_by_side(tmp_path: Path) -> None:
    text = (
        HEAD + "feed words\n | apple |\n | pear |\n | fig |\n\nexpect counts\n | pear | 2 |\n| fig | 1 |\n | plum | 1 |"
    )
    with pytest.raises(TranscriptMismatch) as caught:
        run(tmp_path, text)
    assert caught.value.line == 7
    assert str(caught.value) == "\n".join(
        [
            f"{tmp_path / 't.txt'}, line 7: 'expect counts', after epoch 0:",
            "    expected        found",
            "    | fig   | 1 |   | fig   | 1 |",
            "  ! | pear  | 2 |   | apple | 1 |",
            "  ! | plum  | 1 |   | pear  | 1 |",
        ]
    )
    with pytest.raises(TranscriptMismatch, match="line 3: 'state count', after epoch -1:\n.*\n  ! [|] a [|] 1 [|]$"):
        run(tmp_path, f"{HEAD}\nstate count\n  | a | 1 |")
    with pytest.raises(TranscriptMismatch, match="line 4: 'expect counts', .*\n.*\n  !            [|] a [|] 1 [|]$"):
        run(tmp_path, f"{HEAD}feed words\n | a |\nexpect counts\n nothing")


def test_rows_are_in_any_order_unless_the_line_says_so(tmp_path: Path) -> None:
    fed = HEAD + "feed words\n | a |\n | a |\n"
    run(tmp_path, fed + "expect counts\n | a | 2 |\n | a | 1 |")
    run(tmp_path, fed + "expect counts in order\n | a | 1 |\n | a | 2 |")
    with pytest.raises(TranscriptMismatch, match="  ! [|] a [|] 2 [|]   [|] a [|] 1 [|]\n  ! [|] a [|] 1 [|]   [|] a"):
        run(tmp_path, fed + "expect counts in order\n | a | 2 |\n | a | 1 |")
    with pytest.raises(TranscriptMismatch):
        run(tmp_path, fed + "expect counts\n | a | 2 |\n | a | 1 |\n | a | 1 |")


def test_counts_and_watermarks_are_compared_too(tmp_path: Path) -> None:
    head = "source readings: sensor long, ts timestamp, degrees double\nfeed readings\n| 1 | 2026-01-01 00:10 | 1 |\n"
    run(tmp_path, head + "expect late 0 at hottest\nexpect watermark 2026-01-01 01:08+01:00 at readings", late())
    with pytest.raises(TranscriptMismatch, match="line 4: 'expect late 7 at hottest', .*\nexpected 7, found 0"):
        run(tmp_path, head + "expect late 7 at hottest", late())
    with pytest.raises(TranscriptMismatch, match="expected none, found 2026-01-01 00:08$"):
        run(tmp_path, head + "expect watermark none at hottest", late())


def test_an_update_writes_down_what_was_found_and_touches_nothing_else(tmp_path: Path) -> None:
    before = f"""# A title.
{HEAD}
feed words
\t|   b|
  | aaa |

expect counts
  | aaa | 1 |
  # a remark
  | b | 7 |
state count
expect counts in order
  |aaa| 1 |
  |b| 1 |

expect late 3 at count"""
    after = f"""# A title.
{HEAD}
feed words
\t|   b|
  | aaa |

expect counts
  | aaa | 1 |
  | b   | 1 |
  # a remark
state count
  | aaa | 1 |
  | b   | 1 |
expect counts in order
  |aaa| 1 |
  |b| 1 |

expect late 0 at count"""
    found = run(tmp_path, before, update=True, slots=1)
    in_order = found.split("in order\n")[1].split("\n\n")[0]
    assert found.replace(in_order, "  |aaa| 1 |\n  |b| 1 |") == after
    assert run(tmp_path, found, update=True, slots=1) == found
    run(tmp_path, found, slots=1)


WRONG = {
    "found 'fede words'; expected one of:\n  source NAME: COLUMNS": "fede words",
    "found 'feed'; expected one of": "feed",
    "belongs to no statement": "  | a |",
    "no source 'wodrs'; the query has words": "source wodrs: word string",
    "source 'words' is declared twice": "source words: word string\nsource words: word string",
    "cannot read 'word strnig' as Spark DDL": "source words: word strnig",
    "no line 'source words: ...' with the columns": "feed words\n  | a |",
    "sources are declared before anything else": "source words: word string\ncrash\nsource words: word string",
    "name one of the sources words": f"{HEAD}feed wodrs\n  | a |",
    "'and' goes on with a 'feed'": f"{HEAD}crash\nand words\n  | a |",
    "source 'words' is fed twice in one epoch": f"{HEAD}feed words\n  | a |\nand words\n  | a |",
    "no rows; write 'feed nothing'": f"{HEAD}feed words",
    "'feed nothing' has no source to go on with": f"{HEAD}feed nothing\nand words\n | a |",
    "2 cells found, 1 expected: word": f"{HEAD}feed words\n  | a | b |",
    "a row ends with a bar": f"{HEAD}feed words\n  | a",
    "found 'a b'; expected 'crash', 'crash at committed', or a row": f"{HEAD}feed words\n  a b",
    "a double quote is not closed": f'{HEAD}feed words\n  | 5" wide |',
    "column 'word': found an empty cell; write null": f"{HEAD}feed words\n  |  |",
    "CRASH.at('soon'): give one of 'planned'": f"{HEAD}feed words\n  | a |\n  crash at soon",
    "2 crashes found, at most one expected": f"{HEAD}clock +1 hour\n  crash\n  crash",
    "by='soon': give a duration": f"{HEAD}clock +soon",
    "the clock is at 2026-01-01 00:00 and does not go back": f"{HEAD}clock 2025-12-31 23:59",
    "found 'noon', expected TIMESTAMP: a time such as": f"{HEAD}clock noon",
    "'start' says when the clock starts": f"{HEAD}crash\nstart 2026-01-01",
    "say which source: none has event time": f"{HEAD}watermark 2026-01-01",
    "source 'words' has no event time": f"{HEAD}watermark of words 2026-01-01 00:00",
    "no sink 'cuonts'; the query has counts": f"{HEAD}expect cuonts",
    "nothing has been fed yet": f"{HEAD}expect counts\n nothing",
    "no rows; write 'nothing' if that is what is expected": f"{HEAD}feed words\n  | a |\nexpect counts",
    "found 'nothing'; expected 'nothing' alone": f"{HEAD}feed nothing\nexpect counts\n  nothing\n  | a | 1 |",
    "column 'total': found 'one', expected BIGINT: a whole": f"{HEAD}feed words\n| a |\nexpect counts\n| a | one |",
    "no step 'cuont'; the query has count": f"{HEAD}state cuont\n  nothing",
    "step 'count' has the states total": f"{HEAD}state count.sum\n  nothing",
    "no step 'words'": f"{HEAD}expect late 1 at words",
    "no source or step 'counts'; the query has words, count": f"{HEAD}expect watermark none at counts",
    "'crash' has nothing below it, found '| a |'": f"{HEAD}crash\n  | a |",
}


@pytest.mark.parametrize("message", WRONG)
def test_a_file_that_cannot_be_read_says_where_and_why(message: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        run(tmp_path, WRONG[message])
    assert message in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 't.txt'}, line ")
    assert str(caught.value).count("t.txt") == 1


def test_an_error_of_the_query_has_the_line_as_a_note(tmp_path: Path) -> None:
    class Fails(Count):
        def on_record(self, row: Any, at: ms.At) -> Iterable[Any]:
            raise ValueError("no")

    query = ms.Query("fails")
    query.source("words", None).key_by("word").compute("count", Fails)
    with pytest.raises(ms.StepError) as caught:
        run(tmp_path, HEAD + "\nfeed words\n  | a |", query)
    assert caught.value.__notes__ == [f"{tmp_path / 't.txt'}, line 3"]


def test_states_that_have_no_text_or_need_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="step 'ledger' has several states; say which: ledger.spent"):
        run(tmp_path, (FOLDER / "ledger.txt").read_text() + "\nstate ledger", ledger())

    class Objects(Count):
        total = ms.Value(object)  # type: ignore[assignment]

    query = ms.Query("objects")
    query.source("words", None).key_by("word").compute("count", Objects)
    with pytest.raises(UserError, match="the state 'total' holds Python objects, which have no text"):
        run(tmp_path, HEAD + "state count\n  nothing", query)
