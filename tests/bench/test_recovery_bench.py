"""The recovery benchmark makes the right numbers of what its trials found."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import standstills
from bench.recovery import PARTS, chosen, judged, main, show, trials
from bench.recovery_pictures import draw
from bench.rhino_queries import NAMES
from millstream.control.verbs import Breakdown

GIVEN = {
    "bins": 512, "rate": 5000.0, "workers": 4, "limit": 125_000_000, "kills": 2, "warm_s": 1.0, "hold_s": 1.0,
}  # fmt: skip


def run(kind: str, variant: str, size: int, found: dict[str, Any]) -> dict[str, Any]:
    asked = {"kind": kind, "variant": variant, "state_bytes": size, "label": f"{kind}, {variant}, {size}"}
    return {"asked": asked, "round": 0, "seconds": 1.0, "found": found}


def kill(*seconds: float) -> dict[str, Any]:
    return {
        "kills": [{"recovery_s": each, "noticed_s": 0.3, "steady_s": 1.0, "fetched": 0} for each in seconds],
    }


def handover(stall_s: float, cut_over_s: float, **more: Any) -> dict[str, Any]:
    leg = {"stall_s": stall_s, "steady_s": 1.0, "steady_window_s": 8.0, "cut_over_s": cut_over_s, "fetched": 0}
    return {"legs": [{**leg, **more}]}


def test_every_target_is_a_ratio_of_medians() -> None:
    runs = [
        run("kill", "replica", 64, kill(1.0, 2.0, 9.0)),
        run("kill", "replica", 4000, kill(2.2)),
        run("kill", "store", 4000, kill(33.0)),
        run("kill", "spark", 64, kill(11.0)),
        run("handover", "replica", 64, handover(1.0, 0.5)),
        run("handover", "replica", 4000, handover(1.2, 0.7)),
        run("throughput", "replica", 64, {"records": 100, "epochs_s": [9.0, 9.0, 9.0, 2.0, 2.0]}),
        run("throughput", "store", 64, {"records": 100, "epochs_s": [9.0, 9.0, 9.0, 1.9, 1.9]}),
    ]
    found = [judgement.found for judgement in judged(runs)]
    assert found == [pytest.approx(each) for each in (1.4, 1.2, 1.2, 1.1, 1 / 15, 0.2, 0.95)]
    console = Console(record=True, width=160)
    show(console, runs)
    text = console.export_text()
    assert "33.00 s" in text
    assert "2.00 s (mean 4.00, 1.00-9.00, n=3)" in text


def test_what_was_not_measured_has_no_ratio() -> None:
    assert all(judgement.found is None for judgement in judged([]))


def test_a_handover_without_quiet_time_has_no_ratio_to_it() -> None:
    for leg in (handover(1.0, 0.5, steady_s=0.0), {"legs": [{"stall_s": 1.0, "steady_s": 63.8, "cut_over_s": 0.5}]}):
        [verdict] = [j.verdict for j in judged([run("handover", "replica", 64, leg)]) if "/ steady" in j.target.text]
        assert "no quiet time" in verdict


def test_quiet_time_begins_when_the_query_has_settled() -> None:
    commits = [0.0, 64.0, 65.0, 66.0, 67.5, 68.5, 71.0, 72.0, 79.0]
    found = standstills.stalls_of(commits, settled_at=65.0, asked_at=68.6, ended=71.0)
    assert found == pytest.approx(
        {"stall_s": 2.5, "cut_over_s": 2.5, "steady_s": 1.5, "usual_s": 1.0, "steady_window_s": 2.4}
    )


def test_quiet_time_goes_on_after_a_handover_that_took_longer() -> None:
    commits = [0.0, 63.8, 64.8, 66.0, 70.0, 75.0, 79.0, 80.0, 82.0, 83.0, 90.0]
    found = standstills.stalls_of(commits, settled_at=63.8, asked_at=66.5, ended=75.0)
    assert standstills.missing_s(63.8, 66.5, 75.0) == pytest.approx(5.8)
    # 79.0 ends the first epoch after the end, and 90.0 comes later than what is missing.
    assert found["steady_s"] == pytest.approx(2.0)
    assert (found["stall_s"], found["steady_window_s"]) == pytest.approx((5.0, 8.5))


def test_there_is_an_epoch_to_compare_a_short_handover_with() -> None:
    found = standstills.stalls_of([0.0, 1.0, 3.0, 3.6, 4.0], settled_at=1.0, asked_at=3.5, ended=3.6)
    assert (found["steady_s"], found["usual_s"]) == (2.0, 2.0)


def test_recovery_ends_with_an_epoch_that_had_to_do_without_the_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    def facts(attempts: int, duration_ms: float) -> SimpleNamespace:
        return SimpleNamespace(
            attempts=attempts,
            duration_ms=duration_ms,
            fetched_bytes=5,
            parts_ms={"plan": 100.0},
            sources={"replica": 7},
        )

    victims: list[str] = []

    def kill(spark: Any, victim: str) -> tuple[float, float]:
        victims.append(victim)
        return 13.0, 13.2

    monkeypatch.setattr(standstills, "kill", kill)
    seen = {1: facts(1, 900.0), 2: facts(1, 900.0)}
    commits = {1: 11.0, 2: 12.5}

    def wait(over: Callable[[], bool]) -> None:
        assert not over()
        seen[3], commits[3] = facts(1, 900.0), 13.5  # it was under way, and had all it needed
        assert not over()
        seen[4], commits[4] = facts(2, 1500.0), 15.2
        assert over()

    spark: Any = None  # it is not asked
    running = SimpleNamespace(status=lambda: SimpleNamespace(workers={"a": (0,), "b": (1, 2)}))
    found = standstills.kill_one(spark, running, seen, commits, wait, 10.0)
    assert victims == ["b"]
    expected = {"recovery_s": 2.0, "noticed_s": 0.2, "stall_s": 1.7, "steady_s": 1.5, "planned_s": 0.6, "at": 3.0}
    assert {name: found[name] for name in expected} == pytest.approx(expected)


@pytest.mark.parametrize(
    ("lacking", "workers", "replicated", "expected"),
    [(0, 2, True, True), (9 << 20, 2, True, False), (9 << 20, 2, False, True), (0, 3, False, False)],
)
def test_a_query_is_ready_with_all_its_workers_and_replicas(
    lacking: int, workers: int, replicated: bool, expected: bool
) -> None:
    known = SimpleNamespace(groups={0: ("b",), 1: ("a",)}, lacking={0: lacking})
    status = SimpleNamespace(workers={"a": (0,), "b": (1,)})
    running = SimpleNamespace(status=lambda: status, replicas=lambda: known)
    assert standstills.ready(running, workers, replicated) == expected


def test_the_breakdown_adds_up_what_a_query_tells_of_its_migrations() -> None:
    told = [
        SimpleNamespace(number=1, breakdown=Breakdown(9.0, 9.0, 9.0, 9.0, {"store": 9})),
        SimpleNamespace(number=2, breakdown=Breakdown(0.5, 2.0, 0.25, 1.0, {"cache": 10, "replica": 20})),
        SimpleNamespace(number=3, breakdown=None),
        SimpleNamespace(number=4, breakdown=Breakdown(0.5, 1.0, 0.5, 0.25, {"replica": 5, "ahead": 1})),
    ]
    with pytest.raises(RuntimeError, match="only 2 have told"):
        standstills.breakdown(SimpleNamespace(history=lambda: told), [2, 3, 4])
    assert standstills.breakdown(SimpleNamespace(history=lambda: told), [2, 4]) == {
        "scheduling_s": 1.0, "preparing_s": 3.0, "fetching_s": 0.75, "loading_s": 1.25,
        "sources": {"cache": 10, "replica": 25, "ahead": 1},
    }  # fmt: skip


def test_a_round_compares_a_small_state_with_a_large_one_and_replicas_with_the_store() -> None:
    chosen = trials({**GIVEN, "bases": ""}, ("kill", "spark", "handover", "throughput"), 64, 4000, 64)
    assert len({(trial.kind, trial.variant, trial.state_bytes) for trial in chosen}) == len(chosen) == 10


def test_the_part_nexmark_kills_workers_of_all_queries_with_replicas_and_with_the_store() -> None:
    asked = {**GIVEN, "bases": "", "network": False, "only": PARTS, "variants": ("replica", "store"), "queries": NAMES,
             "state_mb": None, "events": 4000.0, "small_mb": 64, "large_mb": 4000, "spark_mb": 64}  # fmt: skip
    found = chosen(asked)
    assert len({trial.name for trial in found}) == len(found) == 16
    kills = [trial for trial in found if hasattr(trial, "query")]
    assert {(trial.query, trial.variant) for trial in kills} == {(q, v) for q in NAMES for v in ("prepared", "store")}
    assert {(trial.kind, trial.rate, trial.kills) for trial in kills} == {("kill", 4000.0, 2)}
    assert len(chosen({**asked, "only": ("nexmark",), "variants": ("store",)})) == 3


def test_kills_of_other_queries_are_shown_but_do_not_count_as_those_of_counts(tmp_path: Path) -> None:
    epochs = [[number, 40 * number, 40 * number + 40, number * 1.0, number + 1.5, 900.0, 0] for number in range(30)]
    nexmark = run(
        "kill", "store", 4000, {"kills": [{**kill(7.77)["kills"][0], "at": 10.0}], "epochs": epochs, "rate": 40.0}
    )
    nexmark["asked"] |= {"query": "nbq8", "variant": "prepared", "label": "kill, nbq8, prepared"}
    stored = {**nexmark, "asked": {**nexmark["asked"], "variant": "store"}}
    runs = [run("kill", "replica", 4000, kill(1.0)), run("kill", "store", 4000, kill(10.0)), nexmark, stored]
    [ratio] = [judgement.found for judgement in judged(runs) if "store only" in judgement.target.text]
    assert ratio == pytest.approx(0.1)
    console = Console(record=True, width=160)
    show(console, runs)
    assert "7.77 s" in console.export_text()
    assert len(draw(runs, tmp_path, "some")) == 1


def test_files_of_several_runs_are_said_not_to_be_one(tmp_path: Path) -> None:
    paths = [tmp_path / f"{name}.json" for name in ("one", "two")]
    for path, commit in zip(paths, ("aaaa", "bbbb"), strict=True):
        runs = [run("kill", "replica", 64, kill(1.0))]
        path.write_text(json.dumps({"quick": False, "machine": {"commit": commit}, "runs": runs}))
    words = "Files of 2 runs, of commit aaaa, bbbb"
    assert words in CliRunner().invoke(main, ["--from", str(paths[0]), "--from", str(paths[1])]).output
    assert "Files of" not in CliRunner().invoke(main, ["--from", str(paths[0])]).output


def test_time_and_bytes_are_broken_down_and_kills_are_drawn(tmp_path: Path) -> None:
    killed = {
        "recovery_s": 1.0, "noticed_s": 0.2, "steady_s": 0.5, "fetched": 3_000_000, "at": 10.0, "planned_s": 0.37,
        "parts_ms": {"fetch": 250.0, "load": 110.0}, "sources": {"replica": 5_000_000, "store": 3_000_000},
    }  # fmt: skip
    epochs = [[number, 10 * number, 10 * number + 10, float(number), number + 1.5, 900.0, 0] for number in range(30)]
    told = {"scheduling_s": 0.02, "preparing_s": 7.5, "fetching_s": 0.0, "loading_s": 0.04, "sources": {"cache": 10**6}}
    runs = [
        run("kill", "replica", 4000, {"kills": [killed], "epochs": epochs, "rate": 10.0}),
        run("handover", "replica", 4000, handover(1.0, 0.5, breakdown=told)),
    ]
    console = Console(record=True, width=160)
    show(console, runs)
    text = console.export_text()
    for number in ("0.37 s", "0.25 s", "0.11 s", "5.0 MB", "3.0 MB", "7.50 s", "0.04 s", "1.0 MB"):
        assert number in text
    [path] = draw(runs, tmp_path, "some")
    assert path.stat().st_size > 10_000
    assert draw([], tmp_path, "none") == []
