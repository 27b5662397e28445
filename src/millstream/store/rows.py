"""Rows of state, as they are written and merged: sorted by (hash, key), or with subkeys by (hash, sub, key)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.protocol.keyspace import Hashes
from millstream.store.keys import KeyColumns, Mask, Rows, concat_keys


@dataclass(frozen=True, slots=True)
class StateRows:
    """One row per key, or per key and subkey, which is then the last column of `keys` and has its hash in `subs`.

    `until` are the times at which rows expire, where the state has a time-to-live.
    """

    hashes: Hashes
    keys: KeyColumns
    values: pa.Array
    dead: Mask
    subs: Hashes | None = None
    until: npt.NDArray[np.int64] | None = None

    def take(self, at: Rows) -> StateRows:
        """Some of the rows."""
        return StateRows(
            self.hashes[at],
            self.keys.take(at),
            self.values.take(pa.array(at)),
            self.dead[at],
            None if self.subs is None else self.subs[at],
            None if self.until is None else self.until[at],
        )


_FOR_EVER = 2**63 - 1


def joined_rows(sources: Sequence[StateRows]) -> StateRows:
    """Rows of several sources, one after the other."""
    subs = [source.subs for source in sources if source.subs is not None]
    until = []
    if any(source.until is not None for source in sources):  # a time-to-live may have been declared later
        until = [np.full(len(source.hashes), _FOR_EVER) if source.until is None else source.until for source in sources]
    return StateRows(
        np.concatenate([source.hashes for source in sources]),
        concat_keys([source.keys for source in sources]),
        pa.concat_arrays([source.values for source in sources]),
        np.concatenate([source.dead for source in sources]),
        np.concatenate(subs) if subs else None,
        np.concatenate(until) if until else None,
    )
