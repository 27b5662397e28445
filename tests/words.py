"""A word count that the simulator runs, for tests of those who control it from elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Any

import millstream as ms
from millstream.store.objects import ObjectStore
from millstream.testing import Simulated

WORDS = [(word,) for word in ["the", "mill", "and", "the", "stream", "and", "the", "wheel", "of", "the", "mill"]]


class Count(ms.Computation):
    """Counts words."""

    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row: Any, at: ms.At) -> Any:
        self.total.set(self.total.get() + 1)
        yield at.key, self.total.get()


def simulated(store: ObjectStore | None = None, **options: Any) -> Simulated:
    query = ms.Query("words")
    query.source("words", None).key_by("word").compute("count", Count).sink("out", ms.Memory())
    return Simulated(query, {"words": "word string"}, store=store, **{"bin_bits": 6, **options})


@contextmanager
def running(sim: Simulated) -> Iterator[None]:
    """Epochs follow each other as long as this lasts."""
    ended, errors = Event(), list[BaseException]()

    def run() -> None:
        try:
            while not ended.is_set():
                sim.feed(words=WORDS)
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    assert not errors, errors


def files(store: ObjectStore) -> list[str]:
    return sorted(item.name for item in store.list(""))
