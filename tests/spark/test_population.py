"""What Spark is told of the number of executors, on each kind of cluster. Against a stand-in for Spark's scheduler that
only writes down what it is told; test_standalone.py has the real one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from millstream.spark import population
from millstream.spark.population import ALL, Population

DECOMMISSION = {"spark.decommission.enabled": "true"}
ALLOCATION = {"spark.dynamicAllocation.enabled": "true"}


class Listed(list[Any]):
    """A sequence as Scala has it."""

    def apply(self, at: int) -> Any:
        return self[at]

    def size(self) -> int:
        return len(self)


class Scheduler:
    """A cluster with some executors, and what it is told."""

    def __init__(self, master: str, settings: dict[str, str], executors: int) -> None:
        self.settings, self.there = settings, {str(number) for number in range(executors)}
        self.leaving: set[str] = set()
        self.told: list[Any] = []
        self.total: int | None = None
        self.sparkContext = self
        self.master = master
        self._jsc = SimpleNamespace(sc=lambda: self)
        info = SimpleNamespace(ExecutorDecommissionInfo=lambda why, host: why)
        spark = SimpleNamespace(scheduler=info)
        self._jvm = SimpleNamespace(
            org=SimpleNamespace(apache=SimpleNamespace(spark=spark)),
            scala=SimpleNamespace(Option=SimpleNamespace(apply=lambda value: value)),
            java=SimpleNamespace(util=SimpleNamespace(HashMap=dict)),
            PythonUtils=SimpleNamespace(toScalaMap=dict),
        )
        self.population = Population(self, lambda: self.there - self.leaving)  # type: ignore[arg-type]

    def getConf(self) -> dict[str, str]:  # noqa: N802
        return self.settings

    def schedulerBackend(self) -> Scheduler:  # noqa: N802
        return self

    def getRequestedTotalExecutors(self) -> Any:  # noqa: N802
        totals = Listed([] if self.total is None else [self.total])
        return SimpleNamespace(values=lambda: SimpleNamespace(toSeq=lambda: totals))

    def requestTotalExecutors(self, total: int, *_: Any) -> bool:  # noqa: N802
        self.total = total
        self.told.append(total)
        return True

    def getExecutorIds(self) -> Listed:  # noqa: N802
        return Listed(sorted(self.there))

    def decommissionExecutor(self, worker: str, *_: Any) -> None:  # noqa: N802
        self.leaving.add(worker)
        self.told.append(f"-{worker}")
        if self.settings.get("spark.decommission.enabled"):
            self.there.discard(worker)

    def killAndReplaceExecutor(self, worker: str) -> None:  # noqa: N802
        self.told.append(f"!{worker}")
        self.there.discard(worker)


def test_a_standalone_cluster_that_uses_all_it_has_is_told_no_number(caplog: pytest.LogCaptureFixture) -> None:
    spark = Scheduler("spark://here:1", DECOMMISSION, 3)
    assert spark.population.ask(3) == 0
    assert not caplog.records, "they are there"
    assert (spark.population.ask(5), spark.population.ask(5)) == (0, 0)
    assert spark.told == []
    assert len(caplog.records) == 1, "it is told once"
    assert "a worker that joins it will be used" in caplog.text


def test_others_are_told_what_there_is_and_what_is_asked_for() -> None:
    spark = Scheduler("yarn", {}, 3)
    assert spark.population.ask(5) == 2
    assert spark.population.ask(6) == 3
    assert spark.told == [5, 6], "those that are on their way count"


def test_executors_that_take_long_to_come_are_asked_for_once_however_often_that_is() -> None:
    spark = Scheduler("yarn", {}, 2)
    for _ in range(4):
        assert spark.population.ask(6) == 4
    assert spark.total == 6
    spark.there.add("new")
    assert spark.population.ask(6) == 3
    assert spark.population.ask(4) == 1, "nothing that is on its way is called off"
    assert spark.total == 6


def test_dynamic_allocation_that_wants_less_than_there_is_does_not_count() -> None:
    spark = Scheduler("spark://here:1", ALLOCATION, 3)
    spark.total = 1
    assert spark.population.ask(4) == 1
    assert spark.told == [4]


def test_what_is_given_back_is_not_started_again_until_it_is_asked_for() -> None:
    spark = Scheduler("spark://here:1", DECOMMISSION, 3)
    spark.population.give_back(["1"])
    assert spark.told == [2, "-1"]
    assert spark.population.ask(3) == 1
    assert spark.told[2:] == [3]


def test_executors_that_do_not_end_change_no_number() -> None:
    spark = Scheduler("spark://here:1", {}, 3)
    spark.population.give_back(["1"])
    assert spark.told == ["-1"]


def test_what_is_left_out_is_ended_and_let_start_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    spark, now = Scheduler("spark://here:1", {}, 3), 10_000.0
    monkeypatch.setattr(population.time, "monotonic", lambda: now)
    spark.population.leave_out(["1"])
    spark.population.try_again()
    assert spark.told == [2, "-1", "!1"], "not yet"
    now += population.AGAIN_S
    spark.population.try_again()
    spark.population.try_again()
    assert spark.told[3:] == [ALL]
    spark.population.leave_out(["2"])
    now += population.AGAIN_S
    spark.population.try_again()
    assert spark.told[-1] == "!2", "the second time it takes longer"
    now += population.AGAIN_S
    spark.population.try_again()
    assert spark.told[-1] == ALL


def test_a_query_that_ends_leaves_its_session_the_executors_that_it_had() -> None:
    spark = Scheduler("yarn", {}, 3)
    spark.population.leave_out(["1"])
    spark.population.restore()
    spark.population.restore()
    assert spark.told == [2, "-1", "!1", 3], "once"
