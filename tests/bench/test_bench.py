"""The benchmark's own code: ratios, verdicts, tables, what is kept; and one contender that really runs."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench import model_plan, plan, report
from bench.command import load, save
from bench.contenders import Contender, worker_memory
from bench.pictures import draw
from bench.race import Part, Run, Watcher, best_run, failure, median_ms, race, rate, run_contender

TINY = Contender("batch", "Millstream on_batch", "millstream-batch", rows=100, keys=50, warmup=0, epochs=1)


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where contenders' folders go. Not `tmp_path`, which is too long for the sockets of Spark's Python workers."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        monkeypatch.setattr("tempfile.tempdir", folder)
        yield Path(folder)


def a_run(contender: str, *times: float, rows: int = 1000, round_: int = 0, **facts: Any) -> Run:
    epochs = [
        {"epoch": number, "rows": rows, "ms": time, "spark": {"triggerExecution": time, "addBatch": time}}
        for number, time in enumerate(times)
    ]
    return {"contender": contender, "round": round_, "seconds": 1.0, "found": {"epochs": epochs, **facts}}


def a_failure(contender: str, reason: str) -> Run:
    return {"contender": contender, "round": 0, "seconds": 1.0, "failed": reason}


def a_target(at_least: bool, limit: float, aim: float, found: float) -> report.Target:
    return report.Target("throughput", "a ratio", at_least, limit, aim, lambda part, runs: found)


def part_of(name: str) -> Part:
    return next(part for part in plan.parts(plan.QUICK) if part.name == name)


def text_of(show: Callable[[Console], None]) -> str:
    out = io.StringIO()
    show(Console(file=out, width=200))
    return out.getvalue()


def everything() -> list[tuple[Part, list[Run]]]:
    """Runs of every contender of every part; later contenders are slower."""
    measured = []
    for part in [*plan.parts(plan.QUICK), *model_plan.parts(True, 1)]:
        runs = [
            a_run(c.name, *[100.0 + 10 * place + i for i in range(30)], rows=c.rows, private_peak_bytes=1000 + place)
            for place, c in enumerate(part.contenders)
        ]
        measured.append((part, runs))
    return measured


def test_a_rate_is_rows_over_the_median_epoch_time() -> None:
    assert rate(a_run("batch", 100, 500, 110, rows=1000)) == pytest.approx(1000 / 0.110)


def test_the_best_round_counts_and_failed_ones_do_not() -> None:
    runs = [a_run("batch", 300), a_run("batch", 200, 210, 220, round_=1), a_failure("batch", "lost"), a_run("map", 1)]
    best = best_run(runs, "batch")
    assert best is not None
    assert median_ms(best) == 210
    assert best_run([a_failure("batch", "lost")], "batch") is None


@pytest.mark.parametrize(
    ("at_least", "found", "verdict"),
    [
        (True, 25.0, "aim reached"),
        (True, 12.0, "reached"),
        (True, 11.99, "missed"),
        (False, 1.0, "missed"),
        (False, 0.5, "reached"),
        (False, 0.1, "aim reached"),
    ],
)
def test_a_verdict_compares_with_the_target_and_the_aim(at_least: bool, found: float, verdict: str) -> None:
    target = a_target(True, 12, 25, found) if at_least else a_target(False, 0.5, 0.1, found)
    assert report.judge(target, part_of("throughput"), []).verdict == verdict


def test_ratios_are_taken_between_the_right_contenders() -> None:
    part = part_of("throughput")
    runs = [
        a_run("batch", 100),
        a_run("rocksdb", 1500),
        a_run("hdfs", 700),
        a_run("map", 50),
        a_run("record", 20, rows=100),
        a_run("rows", 1000, rows=100),
    ]
    found = {j.target.text: j.found for j in report.judgements([(part, runs)])}
    assert list(found.values()) == pytest.approx([15.0, 7.0, 0.5, 50.0])
    assert list(found) == [target.text for target in report.TARGETS if target.part == "throughput"]


def test_the_smallest_epoch_is_compared_with_the_faster_of_sparks_two() -> None:
    runs = [a_run("batch", 300), a_run("rocksdb", 400), a_run("hdfs", 200)]
    [judged] = report.judgements([(part_of("smallest"), runs)])
    assert judged.found == pytest.approx(1.5)


@pytest.mark.parametrize("name", ["state", "bins"])
def test_the_largest_is_compared_with_the_smallest(name: str) -> None:
    part = part_of(name)
    runs = [a_run(contender.name, 100.0 * (place + 1)) for place, contender in enumerate(part.contenders)]
    [judged] = report.judgements([(part, runs)])
    assert judged.found == pytest.approx(len(part.contenders))


def test_memory_is_compared_by_what_workers_hold_and_not_by_time() -> None:
    part = part_of("memory")
    runs = [a_run(c.name, 1, private_peak_bytes=size) for c, size in zip(part.contenders, (100, 110), strict=True)]
    [judged] = report.judgements([(part, runs)])
    assert judged.found == pytest.approx(1.1)
    assert judged.verdict == "reached"


def test_warming_up_counts_for_one_ratio_of_a_steady_run_and_not_for_the_other() -> None:
    runs = [a_run("batch", *[1000.0] * 5, *[100.0] * 40, 200.0)]
    whole, later = report.judgements([(part_of("steady"), runs)])
    assert whole.found == pytest.approx(10.0)
    assert later.found == pytest.approx(2.0)


def test_one_more_level_is_what_it_adds_over_an_epoch_with_one() -> None:
    part = next(part for part in model_plan.parts(True, 1) if part.name == "levels")
    runs = [a_run("levels-1", 100), a_run("levels-2", 150), a_run("levels-3", 180)]
    [judged] = report.judgements([(part, runs)])
    assert judged.found == pytest.approx(0.4)


def test_every_contender_of_every_part_can_be_run_and_every_target_has_its_contenders() -> None:
    from bench.contenders import KINDS
    from bench.model_contenders import MODEL_KINDS

    parts = [*plan.parts(plan.QUICK), *model_plan.parts(True, 1)]
    assert {c.kind for part in parts for c in part.contenders} <= {*KINDS, *MODEL_KINDS}
    assert not KINDS.keys() & MODEL_KINDS.keys()
    assert all(judged.found is not None for judged in report.judgements(everything()))


def test_a_failed_contender_is_named_with_its_reason_in_both_tables() -> None:
    runs = [a_run("batch", 100), a_failure("rocksdb", "no space\n  left"), a_run("map", 50)]
    shown = text_of(lambda console: report.show(console, [(part_of("throughput"), runs)]))
    assert "failed: no space left" in shown
    assert "no result: rocksdb: no space left" in shown
    assert failure(runs, "hdfs") == "not measured"
    assert "no result: hdfs: not measured" in shown


def test_a_steady_run_too_short_to_skip_its_warm_up_has_no_ratio() -> None:
    whole, later = report.judgements([(part_of("steady"), [a_run("batch", 100, 100)])])
    assert whole.found == 1.0
    assert later.verdict == "no result: only 2 epochs"


def test_the_slowest_epochs_are_listed_slowest_first() -> None:
    epochs = a_run("batch", 100, 900, 200)["found"]["epochs"]
    shown = text_of(lambda console: console.print(report.slowest_table(epochs, 2)))
    assert shown.index("900") < shown.index("200")
    assert "100" not in shown


def test_what_was_saved_is_judged_the_same_after_loading(tmp_path: Path) -> None:
    measured = everything()
    save(tmp_path / "run.json", {"quick": True, "machine": {}}, measured)
    facts, again = load(tmp_path / "run.json")
    assert facts == {"quick": True, "machine": {}}
    assert again == measured
    assert [j.found for j in report.judgements(again)] == [j.found for j in report.judgements(measured)]


def test_pictures_are_drawn_of_what_was_measured_only(tmp_path: Path) -> None:
    names = [path.name for path in draw(everything(), tmp_path, "run")]
    assert names == ["run-rates.png", "run-state.png", "run-epochs.png"]
    assert all((tmp_path / name).stat().st_size > 1000 for name in names)
    assert draw([(part, []) for part, _ in everything()], tmp_path, "none") == []


def test_full_sizes_are_those_of_the_targets() -> None:
    parts = {part.name: part for part in plan.parts(plan.FULL, rounds=3)}
    assert [c.keys for c in parts["state"].contenders] == [10**5, 10**6, 10**7, 5 * 10**7]
    assert [c.bins for c in parts["bins"].contenders] == [2**4, 2**12, 2**20]
    assert [c.state_bytes for c in parts["memory"].contenders] == [5 * 10**8, 4 * 10**9]
    assert parts["steady"].contenders[0].epochs == 200
    assert parts["throughput"].rounds == 3
    by_name = {c.name: c for c in parts["throughput"].contenders}
    assert (by_name["batch"].rows, by_name["batch"].keys) == (10**6, 10**6)
    for one, other in (("batch", "rocksdb"), ("batch", "hdfs"), ("batch", "map"), ("record", "rows")):
        assert (by_name[one].rows, by_name[one].keys) == (by_name[other].rows, by_name[other].keys)


def test_an_unknown_contender_is_reported_as_failed_and_leaves_nothing_behind(
    temporary: Path,
) -> None:
    kept: list[Run] = []
    unknown = replace(TINY, kind="nobody")
    race(Part("throughput", "Throughput", (unknown,), 1), 60, Watcher(), kept.append)
    assert kept[0]["failed"] == "KeyError: 'nobody'"
    assert list(temporary.iterdir()) == []


def test_a_contender_that_takes_too_long_is_ended(temporary: Path) -> None:
    assert run_contender(TINY, 0.0, lambda done, of: None) == {"failed": "no result within 0 s"}
    assert list(temporary.iterdir()) == []


FAKE_DAEMON = "import os, sys; os.fork(); print(os.getpid(), flush=True); sys.stdin.read()"


def test_only_the_children_of_a_daemon_below_the_given_process_are_measured() -> None:
    command = [sys.executable, "-c", FAKE_DAEMON, "pyspark.daemon"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as daemon:
        assert daemon.stdout is not None
        assert len({daemon.stdout.readline(), daemon.stdout.readline()}) == 2  # both are there
        [size] = worker_memory(daemon.pid)
        assert size > 0
        assert size in worker_memory(os.getpid())
        assert list(worker_memory(2**30)) == []


@pytest.mark.spark
@pytest.mark.slow
def test_the_smallest_on_batch_contender_gives_epochs_and_leaves_nothing_behind(
    temporary: Path,
) -> None:
    seen: list[tuple[int, int]] = []
    run = run_contender(TINY, 300, lambda done, of: seen.append((done, of)))
    assert "found" in run, run
    [epoch] = run["found"]["epochs"]
    assert epoch["rows"] == 100
    assert epoch["ms"] == epoch["spark"]["triggerExecution"]
    assert epoch["millstream"]["records"] == {"count": 100}
    assert seen
    assert list(temporary.iterdir()) == []
