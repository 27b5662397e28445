"""What `keyed.window(...)` returns, and which computation each kind of window takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millstream.errors import UserError
from millstream.library.partial import Partial, check_free
from millstream.library.parts import Aggregate
from millstream.library.sessions import SessionTotals
from millstream.library.sliding import SlidingTotals
from millstream.library.totals import check_aggregates, combined, counted
from millstream.library.tumbling import FINAL, TumblingTotals
from millstream.library.windows import END, START, Window, check_window, session_window
from millstream.model.query import KeyedStream, Stream


@dataclass(frozen=True, slots=True)
class WindowedStream:
    """A keyed stream, cut into windows of event time.

    >>> import millstream as ms
    >>> query = ms.Query("shop")
    >>> orders = query.source("orders", None, event_time="ts").key_by("customer")
    >>> stream = orders.window(ms.tumbling("1 minute")).aggregate("per_minute", n=ms.count(), total=ms.sum("amount"))
    >>> query
    Query('shop'): orders -> per_minute-partial, per_minute-partial -> per_minute
    """

    keyed: KeyedStream
    window: Window

    def count(self, name: str, *, early: bool = False, late: str = "drop") -> Stream:
        """Adds a step that counts the records of each key and window: `aggregate(name, count=ms.count())`."""
        return self._add(name, counted(), early, late)

    def aggregate(self, name: str, /, *, early: bool = False, late: str = "drop", **aggregates: Aggregate) -> Stream:
        """Adds a step that aggregates the records of each key and window.

        It produces the key, `window_start`, `window_end` and the aggregates, once the watermark has reached the end of
        the window. With `early`, a window is produced in every epoch that changes it, too, and a last column `final`
        tells them apart. A record is late if all its windows have closed: `late` is "drop" or "output".
        """
        return self._add(name, aggregates, early, late)

    def _add(self, name: str, aggregates: Mapping[str, Aggregate], early: bool, late: str) -> Stream:
        keyed, window = self.keyed, check_window(self.window)
        own = (START, END, *([FINAL] if early else []))
        try:
            for column in own:
                check_free(column, keyed.key)
        except UserError as error:
            raise UserError(f"step {name!r}: {error}") from error
        check_aggregates(name, (*keyed.key, *own), aggregates)
        if late not in ("drop", "output"):
            raise UserError(f"step {name!r}: late={late!r}; a window that has closed takes no more: 'drop' or 'output'")
        keep = late == "output"
        if keep and window.gap:
            window = session_window(window.gap, 1)  # each record is a piece
        partial = combined(keyed, name, Partial(keyed.key, aggregates, window, keep))
        arguments = (aggregates, window, early, not keep)
        if window.gap:
            return partial.key_by(*keyed.key).compute(name, SessionTotals(*arguments), late="process")
        if window.size != window.every:
            return partial.key_by(*keyed.key).compute(name, SlidingTotals(*arguments), late=late)
        return partial.key_by(*keyed.key, START).compute(name, TumblingTotals(*arguments), late=late)
