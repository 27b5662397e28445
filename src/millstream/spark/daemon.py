"""The process that Spark's Python workers are forked from (`spark.python.daemon.module`), with all that tasks import
already imported.

Rules
-----
- A Python worker that was lost is replaced by a fork, and runs its first task at once: importing takes most of a second
  of CPU time, and after the loss of an executor several workers are replaced at the same moment.
- Spark has every worker collect garbage after each task. What was imported here is none, and is not looked at again.
- Nothing is started and nothing is opened here: a fork has one thread, and must not share a lock or a file with others.
"""

from __future__ import annotations

import gc

import pandas as pd  # noqa: F401 (pyarrow imports it as soon as it converts anything)
from pyspark.daemon import manager

import millstream.engine.host
import millstream.spark.tasks  # noqa: F401


def main() -> None:
    """Serves forks until Spark ends it."""
    gc.collect()
    gc.freeze()
    manager()


if __name__ == "__main__":
    main()
