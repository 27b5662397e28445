"""The handle that suits a declaration: what stands in its place on a running computation.

Rules
-----
- A handle lives for one batch of one slot. It reads what is stored when it is asked to, and gives back what changed.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from millstream.errors import InvariantViolation
from millstream.model.bags import Bag, BatchBag, RecordBag
from millstream.model.batch import Batch
from millstream.model.kinds import State
from millstream.model.maps import BatchMap, Map, RecordMap
from millstream.model.state import BatchValue, CopiedRecordValue, PickledRecordValue, RecordValue, Value

BatchHandle = BatchValue | BatchMap | BatchBag
RecordHandle = RecordValue | RecordMap | RecordBag
Handle = BatchHandle | RecordHandle


def batch_handle(declared: State, batch: Batch, stored: Any) -> BatchHandle:
    """The handle in a computation with `on_batch`."""
    match declared:
        case Value():
            return BatchValue(declared, batch, stored)
        case Map():
            return BatchMap(declared, batch, stored)
        case Bag():
            return BatchBag(declared, batch, stored)
    raise InvariantViolation(f"no handle for {declared!r}")


def record_handle(declared: State, batch: Batch, stored: Any) -> RecordHandle:
    """The handle in a computation with `on_record`."""
    match declared:
        case Value():
            if declared.is_object:
                return PickledRecordValue(declared, batch, stored)
            kind = CopiedRecordValue if pa.types.is_nested(declared.arrow_type) else RecordValue
            return kind(declared, batch, stored)
        case Map():
            return RecordMap(declared, batch, stored)
        case Bag():
            return RecordBag(declared, batch, stored)
    raise InvariantViolation(f"no handle for {declared!r}")
