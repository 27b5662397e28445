"""The process that Spark's Python workers are forked from (`spark.python.daemon.module`), with all that tasks import
already imported.

Rules
-----
- A Python worker that was lost is replaced by a fork, and runs its first task at once: importing takes most of a second
  of CPU time, and after the loss of an executor several workers are replaced at the same moment.
- Spark has every worker collect garbage after each task. What was imported here is none, and is not looked at again.
- Nothing is started and nothing is opened here: a fork must not share a lock or a file with others.
- Forks are not alike: each begins with a seed of its own for numpy's random numbers, as Python's own are by themselves.
- A worker whose executor has closed its socket, because it stops, ends without a word.
"""

from __future__ import annotations

import gc
import os
from typing import Any

import numpy as np
import pandas as pd  # noqa: F401 (pyarrow imports it as soon as it converts anything)
from pyspark import daemon

import millstream.engine.host
import millstream.spark.tasks  # noqa: F401

_worker = daemon.worker


def _serve(sock: Any, authenticated: bool) -> Any:
    """As Spark's worker serves a socket, but for the traceback if nobody is at its other end any more."""
    try:
        return _worker(sock, authenticated)
    except BrokenPipeError:
        return 1


def main() -> None:
    """Serves forks until Spark ends it."""
    os.register_at_fork(after_in_child=np.random.seed)
    daemon.worker = _serve
    gc.collect()
    gc.freeze()
    daemon.manager()


if __name__ == "__main__":
    main()
