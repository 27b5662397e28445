"""Values that were stored before the type of their state changed.

Each time a declared state changes its type, its values get a new *form*, counted from 0. A segment says in which form
its values are. Nothing is rewritten when the type changes: values of an older form are lifted to the current one when
they are read, and stay so when what was read is written again.

Rules
-----
- A value is lifted once through each form between its own and the current one, in order (G1): what is written is always
  of the current form, and says so.
- Only what is taken is lifted: never a whole segment because of a few rows.
- A lift is user code. It sees values that were there, never what stands in the row of a deleted or expired one; such
  rows have null in the current form. If it fails, that is named (`LiftFailure`), and nothing is made up.
- Without older forms nothing of this costs more than a comparison for each segment.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from millstream.errors import InvariantViolation, UserError
from millstream.store.keys import Mask

Lift = Callable[[pa.Array], pa.Array]
"""Values of a form to values of the next one, as many and in the same order."""


class LiftFailure(UserError):
    """A stored value could not be brought to the current form."""


@dataclass(frozen=True, slots=True)
class Forms:
    """The forms of a family: the stored type of the current one, and the lifts, from each form to the next."""

    kind: pa.DataType
    lifts: tuple[Lift, ...] = ()

    @property
    def current(self) -> int:
        return len(self.lifts)

    def then(self, lift: Lift, kind: pa.DataType) -> Forms:
        """The forms after one more change of type."""
        return Forms(kind, (*self.lifts, lift))

    def lift(self, values: pa.Array, form: int, wanted: Mask | None = None) -> pa.Array:
        """Values of a form in the current one. Where `wanted` is false the result is null, unless nothing needs to be
        lifted."""
        if form == len(self.lifts):
            return values
        if form > len(self.lifts):
            raise InvariantViolation(f"values of form {form} found, the current one is {len(self.lifts)}")
        if wanted is None or wanted.all():
            return self._lifted(values, form)
        if not wanted.any():
            return pa.nulls(len(values), self.kind)
        lifted = self._lifted(values.filter(pa.array(wanted)), form)
        return lifted.take(pa.array(np.cumsum(wanted) - 1, mask=~wanted))

    def _lifted(self, values: pa.Array, form: int) -> pa.Array:
        count = len(values)
        for number in range(form, len(self.lifts)):
            try:
                values = self.lifts[number](values)
            except (Exception, SystemExit) as error:
                reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
                raise LiftFailure(f"stored values of an older type cannot be converted: {reason}") from error
            if len(values) != count:
                raise LiftFailure(f"a conversion of {count} stored values gave {len(values)}")
        if values.type != self.kind:
            raise LiftFailure(f"a conversion of stored values gave {values.type}, expected {self.kind}")
        return values

    def pack(self, dumps: Any) -> bytes:
        """As bytes; `dumps` is a pickler that can carry user functions."""
        packed: bytes = dumps(self)
        return packed


NO_FORMS = Forms(pa.null())
"""Those of a state whose type has never changed."""


def sealed(kind: pa.DataType, current: int) -> Forms:
    """Forms of which older ones cannot be read: state that was begun anew, or whose lifts are not at hand."""
    return Forms(kind, (_refused,) * current)


def _refused(values: pa.Array) -> pa.Array:
    raise UserError("the state has changed its type since, and what converts its values is not known here")


@lru_cache(maxsize=256)
def unpacked(data: bytes) -> Forms:
    """The forms in these bytes, none if there are no bytes; unpacked once per process."""
    if not data:
        return NO_FORMS
    forms: Forms = pickle.loads(data)
    return forms
