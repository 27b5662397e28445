"""What it costs to be migratable while nothing migrates: routing by a table of ranges, against a fixed modulo.

Both go through the same code, from keys to the payload of each slot; only the line that finds a record's slot differs.
Tables are as they are at first (a range for each slot), and as bad as they can get: no two neighbouring bins at one
slot. The least of several interleaved runs counts, in processor time of this process.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa

from bench.contenders import Found
from millstream.engine.payload import Parts
from millstream.engine.route import split
from millstream.protocol.keyspace import Hashes, bin_edges
from millstream.protocol.routing import RoutingTable, RoutingVersion, Slot

RECORDS, SLOTS, BIN_BITS, RUNS = 1_000_000, 4, 12, 7


class Modulo:
    """What a table would be if slots were fixed for ever."""

    firsts = tuple(range(SLOTS))
    slot_count = SLOTS

    @staticmethod
    def lookup(hashes: Hashes) -> Any:
        """The slot of every hash."""
        return (hashes % np.uint64(SLOTS)).astype(np.int32)


def scattered() -> RoutingTable:
    """Every bin at another slot than its neighbours."""
    firsts = tuple(bin_edges(1 << BIN_BITS, BIN_BITS))
    return RoutingTable(RoutingVersion(0), BIN_BITS, firsts, tuple(Slot(n % SLOTS) for n in range(len(firsts))))


@dataclass
class _Lane:
    table: Any
    stream: str = "records"
    key: tuple[str, ...] = ("k",)


@dataclass
class _Task:
    lanes: tuple[_Lane, ...]


def measure(records: int = RECORDS, runs: int = RUNS) -> Found:
    """Nanoseconds per record: of all of routing, and of finding the slot alone."""
    keys = np.random.default_rng(7).integers(0, 1 << 40, records)
    batch = pa.record_batch({"k": pa.array(keys)})
    hashes = np.random.default_rng(8).integers(0, 1 << 64, records, dtype=np.uint64)
    tables: dict[str, Any] = {"modulo": Modulo(), "table": RoutingTable.even(SLOTS, BIN_BITS), "scattered": scattered()}
    works: dict[str, Callable[[], Any]] = {}
    for name, table in tables.items():
        works[name] = partial(_route, table, batch)
        works[f"{name} alone"] = partial(table.lookup, hashes)
    least = dict.fromkeys(works, float("inf"))
    for _ in range(runs):
        for name, work in works.items():
            begun = time.process_time_ns()
            work()
            least[name] = min(least[name], (time.process_time_ns() - begun) / records)
    return {"records": records, "slots": SLOTS, "bins": 1 << BIN_BITS, "ns_per_record": least}


def _route(table: Any, batch: pa.RecordBatch) -> None:
    parts: Parts = [[] for _ in range(SLOTS)]
    task: Any = _Task((_Lane(table),))
    split(task, {"records": batch}, "0.0", parts)
