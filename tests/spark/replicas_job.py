"""A query on real executors with replicas, of which parties are killed; run as a process by test_replicas.py.

    python replicas_job.py FOLDER MASTER MODE

Prints one JSON line with what happened.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from processes import SINKS, STATES, add_input, all_delivered

import millstream as ms
from millstream.engine import replicating
from millstream.store.agent import NAME
from three_levels import EVENTS, three_levels


def until(running: ms.RunningQuery, over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not over():
        assert running.active, running.await_termination()
        assert time.monotonic() < deadline, (running.status(), running.replicas())
        time.sleep(0.05)


def processes(word: bytes) -> dict[int, list[bytes]]:
    """The processes with a word in their command line."""
    found = {}
    for path in Path("/proc").iterdir():
        try:
            words = (path / "cmdline").read_bytes().split(b"\0") if path.name.isdigit() else []
        except OSError:
            continue
        if word in words:
            found[int(path.name)] = words
    return found


def executors(application: str) -> dict[str, int]:
    """The processes of this application's executors."""
    found = {}
    for process, words in processes(b"--executor-id").items():
        if application.encode() in words:
            found[words[words.index(b"--executor-id") + 1].decode()] = process
    return found


def agents(workers: dict[str, int]) -> dict[str, int]:
    """The processes of executors' agents."""
    of = {str(executor).encode(): worker for worker, executor in workers.items()}
    return {of[words[4]]: process for process, words in processes(NAME.encode()).items() if words[4] in of}


def family(process: int) -> list[int]:
    """A process, and all that it and those have started."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            parents[int(path.name)] = int((path / "stat").read_text().rsplit(")", 1)[1].split()[1])
    found = [process]
    for parent in found:
        found += [child for child, known in parents.items() if known == parent]
    return found


def kill_python(application: str) -> None:
    """Kills all Python processes of the executors but the agents."""
    there = executors(application)
    for process in {process for each in there.values() for process in family(each)[1:]} - {*agents(there).values()}:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)


def settled(running: ms.RunningQuery, workers: int) -> bool:
    facts = running.replicas()
    return (
        len(facts.agents) == workers
        and all(facts.groups.get(slot) for slots in running.status().workers.values() for slot in slots)
        and not any(facts.lacking.values())
    )


def main(folder: Path, master: str) -> None:
    replicating.FEW = 0  # every byte counts: there are few
    settings = {"spark.ui.enabled": "false", "spark.driver.memory": "1g", "spark.executor.memory": "600m"}
    settings["spark.executor.extraJavaOptions"] = os.environ.get("SPARK_SUBMIT_OPTS", "")
    spark = ms.session("replicas", master=master, settings={**settings, "spark.executor.cores": "1"})
    spark.sparkContext.setLogLevel("OFF")
    application = spark.sparkContext.applicationId
    rng = random.Random(1)
    add_input(folder, rng, files=6)
    frame = spark.readStream.schema(EVENTS["events"]).option("maxFilesPerTrigger", 2).parquet(str(folder / "in"))
    query = three_levels("weak", origin=frame, sinks=[ms.Parquet(str(folder / sink)) for sink in SINKS])
    running = query.start(spark, str(folder / "store"), slots=4, replicas=1)
    until(running, lambda: len(running.status().workers) == 3 and running.epoch >= 3)
    until(running, lambda: settled(running, 3))
    told: dict[str, Any] = {"agents": len(agents(executors(application)))}

    victims = agents(executors(application))
    for process in victims.values():
        os.kill(process, signal.SIGKILL)
    add_input(folder, rng, files=2)
    until(running, lambda: len(agents(executors(application))) == 3 and settled(running, 3))
    told["other agents"] = not set(victims.values()) & set(agents(executors(application)).values())

    for _ in range(5):  # until Spark runs no task elsewhere: what such a one writes has to be fetched afterwards
        add_input(folder, rng, files=2)
        until(running, lambda: all_delivered(folder) and settled(running, 3))
        epoch = running.epoch
        kill_python(application)
        add_input(folder, rng, files=2)
        until(running, lambda epoch=epoch: running.epoch > epoch and all_delivered(folder) and settled(running, 3))
        ran = [facts for facts in running.recent if facts.epoch > epoch]
        told["fetched by other Python workers"] = sum(facts.fetched_bytes for facts in ran)
        told["at home"] = not any(facts.elsewhere for facts in ran)
        if told["at home"]:
            break

    epoch = running.epoch
    for slots in (6, 4):
        handle = running.apply(running.plan_rescale(slots, strategy=ms.Batched(1024, stall_s=0)))
        told[f"rescaled to {slots}"] = handle.wait(120).state  # by the ticks of an idle stream
    told["fetched by rescales"] = sum(facts.fetched_bytes for facts in running.recent if facts.epoch > epoch)
    add_input(folder, rng, files=2)
    until(running, lambda: settled(running, 3))

    before, groups = dict(running.status().workers), running.replicas().groups
    lost = max(before, key=lambda worker: len(before[worker]))
    os.kill(executors(application)[lost], signal.SIGKILL)
    add_input(folder, rng, files=2)
    until(running, lambda: lost not in running.status().workers)
    after = {slot: worker for worker, slots in running.status().workers.items() for slot in slots}
    told["where replicas are"] = all(after[slot] in groups[slot] for slot in before[lost])
    until(running, lambda: all_delivered(folder))
    told["given"] = running.replicas().given
    left = agents(executors(application))
    running.stop()
    deadline = time.monotonic() + 20
    while set(left.values()) & set(processes(NAME.encode())) and time.monotonic() < deadline:
        time.sleep(0.1)
    told["left behind"] = sorted(set(left.values()) & set(processes(NAME.encode())))
    told["epoch"] = running.epoch
    told["states"] = [[list(row) for row in running.state(step, state=state).collect()] for step, state in STATES]
    print("RESULT " + json.dumps(told, default=str), flush=True)
    spark.stop()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
