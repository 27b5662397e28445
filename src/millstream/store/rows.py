"""Rows of state, as they are written and merged: sorted by (hash, key), or with subkeys by (hash, sub, key)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millstream.protocol.keyspace import Hashes
from millstream.store.keys import KeyColumns, Mask, Rows


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
