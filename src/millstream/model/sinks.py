"""Where productions go, as data. How they are delivered is `spark.sinks`' business.

Rules
-----
- A sink receives whole epochs, in order, each with its number. After a crash the last epoch may be delivered again,
  always with the same number and the same bytes; `Parquet` and `Memory` ignore the repetition (G2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa

from millstream.errors import UserError
from millstream.model.arrays import python_rows


class Sink:
    """Base of all sinks."""

    def is_place_of(self, other: Sink) -> bool:
        """Whether both would write to one place, which can hold only one of them."""
        return False


class Parquet(Sink):
    """One Parquet file per epoch in a directory (or below an object-store URI), each appearing whole or not at all.

    Exactly once: an epoch's file is named by its number and created only if it is not there. A plain
    `spark.read.parquet(path)` never sees a part of an epoch, nor an epoch twice.
    """

    def __init__(self, path: str, **options: str) -> None:
        if not isinstance(path, str) or not path:
            raise UserError(f"Parquet needs a path, found {path!r}")
        self.path, self.options = path, options

    def is_place_of(self, other: Sink) -> bool:
        return isinstance(other, Parquet) and self.path.rstrip("/") == other.path.rstrip("/")


class ForeachBatch(Sink):
    """Calls `fn(frame, epoch)` with a Spark DataFrame of the epoch's productions.

    After a crash `fn` may be called again for the last epoch, with the same rows in the same order: make its effect
    depend on the epoch number, and the result is exactly once.
    """

    def __init__(self, fn: Callable[[Any, int], None]) -> None:
        if not callable(fn):
            raise UserError(f"ForeachBatch needs a function of (frame, epoch), found {fn!r}")
        self.fn = fn


class Memory(Sink):
    """Keeps productions in the driver's memory, for tests and notebooks.

    >>> import millstream as ms
    >>> out = ms.Memory()
    >>> out.rows()
    []
    """

    def __init__(self) -> None:
        self.epochs: dict[int, pa.Table] = {}
        """The productions of each epoch that this process delivered."""

    def is_place_of(self, other: Sink) -> bool:
        return self is other

    def table(self) -> pa.Table | None:
        """All productions in order, or None before the first."""
        return pa.concat_tables([self.epochs[epoch] for epoch in sorted(self.epochs)]) if self.epochs else None

    def rows(self) -> list[dict[str, Any]]:
        """All productions in order, as dictionaries. A time outside the years 1 to 9999 is a `numpy.datetime64`."""
        table = self.table()
        return [] if table is None else python_rows(table)
