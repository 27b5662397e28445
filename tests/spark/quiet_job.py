"""Queries that are stopped in every usual way; run as a process by test_quiet.py, which reads what they log."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import millstream as ms
from words import Count


def main(folder: Path, master: str) -> None:
    spark = ms.session("quiet", master=master, settings={"spark.ui.enabled": "false", "spark.driver.memory": "1g"})
    spark.sparkContext.setLogLevel("WARN")

    def start(name: str, **options: object) -> ms.RunningQuery:
        query = ms.Query(name)
        rate = spark.readStream.format("rate").option("rowsPerSecond", 50).load()
        busy = rate.selectExpr("cast(value % 7 as string) word")
        query.source("words", busy).key_by("word").compute("count", Count)
        return query.start(spark, str(folder / name), **options)  # type: ignore[arg-type]

    for _ in range(4):
        running = start("stopped")
        running.wait_epoch(running.epoch + 2, timeout=120)
        running.stop()
    for _ in range(2):
        assert start("available", trigger={"availableNow": True}).await_termination(120)
    for _ in range(2):
        running = start("interrupted")
        running.wait_epoch(running.epoch + 2, timeout=120)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        assert running.await_termination(120)
    log = spark._jvm.org.apache.logging.log4j.LogManager.getLogger("org.apache.spark.Some")  # type: ignore[union-attr]
    log.warn("Failed to cancel job group 7. Cannot find active jobs for it.")
    log.warn("Failed to do something else")
    spark.stop()
    print("RESULT {}", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
