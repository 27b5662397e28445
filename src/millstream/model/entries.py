"""What streams offer beyond `compute`: the names of the library's steps. The library registers what they do.

Rules
-----
- The model does not depend on the library, which sits on it: an entry finds what was registered under its name. Only
  type checkers follow the imports below.
- An entry checks nothing, adds nothing, and passes on what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from millstream.model.letters import STOP
from millstream.model.times import EVENT_TIME

if TYPE_CHECKING:
    import pyarrow as pa

    from millstream.library.parts import Aggregate
    from millstream.library.windowed import WindowedStream
    from millstream.library.windows import Window
    from millstream.model.query import KeyedStream, Stream

_ENTRIES: dict[str, Callable[..., Any]] = {}
Fn = TypeVar("Fn", bound=Callable[..., Any])


def entry(name: str) -> Callable[[Fn], Fn]:
    """Registers what an entry does."""

    def register(fn: Fn) -> Fn:
        _ENTRIES[name] = fn
        return fn

    return register


class StreamEntries:
    """The entries of a stream."""

    __slots__ = ()

    def dedupe(self, name: str, *, id: str | tuple[str, ...], within: str | timedelta, late: str = "drop") -> Stream:
        """Adds a step that lets a record through unless one of its id has passed, less than `within` away in time.

        >>> import millstream as ms
        >>> events = ms.Query("events").source("events", None, event_time="ts", lateness="10 minutes")
        >>> once = events.dedupe("once", id="event_id", within="1 hour")
        """
        found: Stream = _ENTRIES["dedupe"](self, name, id, within, late)
        return found

    def filter(self, name: str, keep: Callable[[pa.RecordBatch], Any]) -> Stream:
        """Lets some records through, without an exchange: those for which `keep` says true.

        `keep` gets a `pyarrow.RecordBatch` and returns a boolean for each record; null is false.

        >>> import millstream as ms, pyarrow.compute as pc
        >>> orders = ms.Query("shop").source("orders", None)
        >>> large = orders.filter("large", lambda batch: pc.greater(batch["amount"], 100))
        """
        found: Stream = _ENTRIES["filter"](self, name, keep)
        return found


class KeyedEntries:
    """The entries of a keyed stream."""

    __slots__ = ()

    def count(self, name: str) -> Stream:
        """Adds a step that counts the records of each key; a row for each key that an epoch changes.

        >>> import millstream as ms
        >>> query = ms.Query("words")
        >>> counts = query.source("words", None).key_by("word").count("counts")
        """
        found: Stream = _ENTRIES["count"](self, name)
        return found

    def aggregate(
        self, name: str, /, *, on_error: str = STOP, productions: str = "weak", **aggregates: Aggregate
    ) -> Stream:
        """Adds a step that aggregates the records of each key; a row for each key that an epoch changes. For `on_error`
        and `productions`, see `KeyedStream.compute`.

        >>> import millstream as ms
        >>> query = ms.Query("shop")
        >>> orders = query.source("orders", None).key_by("customer")
        >>> totals = orders.aggregate("totals", n=ms.count(), spent=ms.sum("amount"))
        """
        found: Stream = _ENTRIES["aggregate"](self, name, aggregates, on_error, productions)
        return found

    def window(self, window: Window) -> WindowedStream:
        """Cuts the stream into windows of event time: `tumbling`, `sliding` or `sessions`. Then aggregate it."""
        found: WindowedStream = _ENTRIES["window"](self, window)
        return found

    def join(
        self,
        name: str,
        right: KeyedStream,
        *,
        window: Window | None = None,
        between: tuple[Any, Any] | None = None,
        suffix: str = "_right",
    ) -> Stream:
        """Adds a step that joins two keyed streams: pairs of records with equal keys, as they come.

        With `window`, a tumbling window, only pairs within one window; with `between`, two durations, only those whose
        times are so far apart, the right one less the left one. Without either, all records are kept for ever. It
        produces the key, the left columns and the right columns; right ones whose names are taken get the `suffix`.

        >>> import millstream as ms
        >>> query = ms.Query("shop")
        >>> orders = query.source("orders", None, event_time="ts").key_by("id")
        >>> paid = query.source("payments", None, event_time="ts").key_by("order_id")
        >>> pairs = orders.join("paid", paid, between=("-1 minute", "1 hour"))
        """
        found: Stream = _ENTRIES["join"](self, name, right, window, between, suffix)
        return found

    def top_n(self, name: str, n: int, *, by: str, descending: bool = True) -> Stream:
        """Adds a step that keeps the n best records of each key by a column, and produces them when they change.

        A production has the key, a `rank` from 1 on, and the record's other columns.

        >>> import millstream as ms
        >>> query = ms.Query("games")
        >>> best = query.source("scores", None).key_by("game").top_n("best", 10, by="score")
        """
        found: Stream = _ENTRIES["top_n"](self, name, n, by, descending)
        return found

    def state_machine(
        self,
        name: str,
        fold: Callable[[Any, Any, Any], tuple[Any, Any]],
        *,
        state: str | type[object] = object,
        output: str,
        late: str | None = None,
        on_error: str = STOP,
        productions: str = "weak",
    ) -> Stream:
        """Adds a step that runs `fold(key, record, state)`, which returns the new state and a list of productions.

        The state of a key is None at first; returning None drops it. `state` is its type, `output` a schema. For
        `late`, `on_error` and `productions`, see `KeyedStream.compute`.

        >>> import millstream as ms
        >>> def count(word, record, seen):
        ...     return (seen or 0) + 1, [(word, (seen or 0) + 1)]
        >>> words = ms.Query("words").source("words", None).key_by("word")
        >>> counts = words.state_machine("count", count, state="long", output="word string, count long")
        """
        found: Stream = _ENTRIES["state_machine"](
            self, name, fold, state, output, late=late, on_error=on_error, productions=productions
        )
        return found

    def unary(
        self,
        name: str,
        fn: Callable[[Any, Any, Any, Any], Any],
        *,
        state: str | type[object] = object,
        output: str = "",
        timer: str = EVENT_TIME,
        late: str | None = None,
        on_error: str = STOP,
        productions: str = "weak",
    ) -> Stream:
        """Adds a step that runs `fn(at, record, state, later)` and produces what it returns or yields.

        `state` has `get`, `set`, `delete` and `exists`. `later.at(when, record)` posts a record, or any value: at that
        time `fn` is called with it. `timer` says whether that is of EVENT_TIME or WALL_TIME. For `late`, `on_error` and
        `productions`, see `KeyedStream.compute`.
        """
        found: Stream = _ENTRIES["unary"](
            self, name, fn, state, output, timer, late=late, on_error=on_error, productions=productions
        )
        return found

    def binary(
        self,
        name: str,
        right: KeyedStream,
        fn: Callable[[Any, Any, Any, Any, Any, Any], Any],
        *,
        state: str | type[object] = object,
        output: str = "",
        timer: str = EVENT_TIME,
        late: str | None = None,
        on_error: str = STOP,
        productions: str = "weak",
    ) -> Stream:
        """Adds a step of two streams that share a state: `fn(at, left, right, state, later_left, later_right)`.

        It is called for each record, which is `left` or `right`; the other is None. The rest is as in `unary`.
        """
        found: Stream = _ENTRIES["binary"](
            self, name, right, fn, state, output, timer, late=late, on_error=on_error, productions=productions
        )
        return found
