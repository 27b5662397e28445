"""What `keyed.window(...)` returns, and which computation each kind of window takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from millstream.errors import UserError
from millstream.library.partial import Partial, check_free
from millstream.library.parts import Aggregate
from millstream.library.sessions import SessionTotals
from millstream.library.sliding import SlidingTotals
from millstream.library.totals import check_aggregates, check_options, combined, counted
from millstream.library.tumbling import FINAL, TumblingTotals
from millstream.library.windows import END, START, Window, check_window, session_window
from millstream.model.letters import DEAD_LETTER, STOP
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

    def aggregate(
        self,
        name: str,
        /,
        *,
        early: bool = False,
        late: str = "drop",
        on_error: str = STOP,
        productions: str = "weak",
        **aggregates: Aggregate,
    ) -> Stream:
        """Adds a step that aggregates the records of each key and window.

        It produces the key, `window_start`, `window_end` and the aggregates, once the watermark has reached the end of
        the window. With `early`, a window is produced in every epoch that changes it, too, and a last column `final`
        tells them apart. A record is late if all its windows have closed: `late` is "drop" or "output". For `on_error`
        and `productions`, see `KeyedStream.compute`.
        """
        return self._add(name, aggregates, early, late, on_error, productions)

    def _add(
        self,
        name: str,
        aggregates: Mapping[str, Aggregate],
        early: bool,
        late: str,
        on_error: str = STOP,
        productions: str = "weak",
    ) -> Stream:
        keyed, window = self.keyed, check_window(self.window)
        check_options(name, early=early, late=late, on_error=on_error, productions=productions)
        own = (START, END, *([FINAL] if early else []))
        try:
            for column in own:
                check_free(column, keyed.key)
        except UserError as error:
            raise UserError(f"step {name!r}: {error}") from error
        check_aggregates(name, (*keyed.key, *own), aggregates)
        if late not in ("drop", "output"):
            raise UserError(f"step {name!r}: late={late!r}; a window that has closed takes no more: 'drop' or 'output'")
        keep = late == "output" or on_error == DEAD_LETTER  # the step needs records as they are
        if keep and window.gap:
            window = session_window(window.gap, 1)  # each record is a piece
        partial = combined(keyed, name, Partial(keyed.key, aggregates, window, keep, late == "output"))
        arguments = (aggregates, window, early, not keep)
        step: SessionTotals | SlidingTotals | TumblingTotals
        if window.gap:
            step = SessionTotals(*arguments, late == "output")
            late = "process"  # it judges records itself
        elif window.size != window.every:
            step = SlidingTotals(*arguments)
        else:
            step = TumblingTotals(*arguments)
        by = (*keyed.key, START) if isinstance(step, TumblingTotals) else keyed.key
        return partial.key_by(*by).compute(name, step, late=late, on_error=on_error, productions=productions)
