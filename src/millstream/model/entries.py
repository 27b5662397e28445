"""What streams offer beyond `compute`: the names of the library's steps. The library registers what they do.

Rules
-----
- The model does not depend on the library, which sits on it: an entry finds what was registered under its name. Only
  type checkers follow the imports below.
- An entry checks nothing, adds nothing, and passes on what it was given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from millstream.library.parts import Aggregate
    from millstream.library.windowed import WindowedStream
    from millstream.library.windows import Window
    from millstream.model.query import Stream

_ENTRIES: dict[str, Callable[..., Any]] = {}
Fn = TypeVar("Fn", bound=Callable[..., Any])


def entry(name: str) -> Callable[[Fn], Fn]:
    """Registers what an entry does."""

    def register(fn: Fn) -> Fn:
        _ENTRIES[name] = fn
        return fn

    return register


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

    def aggregate(self, name: str, /, **aggregates: Aggregate) -> Stream:
        """Adds a step that aggregates the records of each key; a row for each key that an epoch changes.

        >>> import millstream as ms
        >>> query = ms.Query("shop")
        >>> orders = query.source("orders", None).key_by("customer")
        >>> totals = orders.aggregate("totals", n=ms.count(), spent=ms.sum("amount"))
        """
        found: Stream = _ENTRIES["aggregate"](self, name, aggregates)
        return found

    def window(self, window: Window) -> WindowedStream:
        """Cuts the stream into windows of event time: `tumbling`, `sliding` or `sessions`. Then aggregate it."""
        found: WindowedStream = _ENTRIES["window"](self, window)
        return found
