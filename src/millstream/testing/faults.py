"""Seeded, repeatable faults: a store that fails on its k-th operation, and crashes at named moments."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from millstream.errors import StoreUnavailable
from millstream.store.objects import Data, Listed, ObjectStore


class Crash(BaseException):
    """The process is gone, as far as the code under test can tell: no `except Exception` stops it."""


class FaultyStore:
    """A store whose k-th operation (counted from 1) fails; `operations` says how many there were.

    `mode` says how: "refuse" raises and does nothing; "lose" does it and loses the reply; "crash" ends the process
    before, "crash_after" after it was done.

    >>> from millstream.store.objects import open_store
    >>> store = FaultyStore(open_store("memory://"), fail_at=2)
    >>> store.put("a", b"1")
    >>> store.put("b", b"2")
    Traceback (most recent call last):
    millstream.errors.StoreUnavailable: operation 2 refused (injected)
    """

    def __init__(self, store: ObjectStore, fail_at: int = 0, mode: str = "refuse") -> None:
        self.uri, self.inner, self.fail_at, self.mode = store.uri, store, fail_at, mode
        self.operations = 0

    def _before(self) -> bool:
        """Counts an operation. True if it must be done and then fail."""
        self.operations += 1
        if self.operations != self.fail_at:
            return False
        if self.mode == "refuse":
            raise StoreUnavailable(f"operation {self.operations} refused (injected)")
        if self.mode == "crash":
            raise Crash(f"crash before operation {self.operations}")
        return True

    def _after(self) -> None:
        if self.mode == "crash_after":
            raise Crash(f"crash after operation {self.operations}")
        raise StoreUnavailable(f"the reply to operation {self.operations} was lost (injected)")

    def create(self, name: str, data: Data) -> bool:
        fail = self._before()
        result = self.inner.create(name, data)
        if fail:
            self._after()
        return result

    def put(self, name: str, data: Data) -> None:
        fail = self._before()
        self.inner.put(name, data)
        if fail:
            self._after()

    def get(self, name: str) -> memoryview | None:
        fail = self._before()
        result = self.inner.get(name)
        if fail:
            self._after()
        return result

    def get_ranges(self, name: str, spans: Sequence[tuple[int, int]]) -> Sequence[memoryview] | None:
        fail = self._before()
        result = self.inner.get_ranges(name, spans)
        if fail:
            self._after()
        return result

    def list(self, prefix: str) -> Iterator[Listed]:
        fail = self._before()
        result = list(self.inner.list(prefix))
        if fail:
            self._after()
        return iter(result)

    def delete(self, names: Iterable[str]) -> None:
        fail = self._before()
        self.inner.delete(names)
        if fail:
            self._after()

    def path(self, name: str) -> Path | None:
        return self.inner.path(name)
