"""Rhino's experiments make the right numbers of what their trials found, and a trial runs from end to end."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import balance, rates, recovery, rhino_report, scaling
from bench.race import Run, run_contender
from bench.rhino_command import MAIN, trials
from bench.rhino_queries import LIVE_S, NAMES, WINDOWS_S, Pace, workload
from bench.rhino_report import changes, judged
from bench.rhino_trials import Reconfiguration
from bench.trial_command import Benchmark, command, number
from millstream.control.cli import benchmarks
from millstream.nexmark.catalogue import QUERIES
from millstream.nexmark.events import generate, rows_of
from millstream.nexmark.oracle import ORACLES
from millstream.store.objects import open_store
from millstream.testing import Simulated

TICKS = 40.0
ROOT = Path(__file__).parent.parent.parent


def asked(kind: str, query: str, variant: str, **more: Any) -> Reconfiguration:
    given = {"bins": 64, "rate": 2000.0, "workers": 4, "limit": 125_000_000, "warm_s": 2.0, "hold_s": 10.0, **more}
    label = f"{kind}, {query}, {variant}"
    return Reconfiguration(label, label, kind, query, variant, 4_000_000, "all-at-once", **given)


def a_run(kind: str, query: str, variant: str, stall_s: float, slow_at: float = -1.0, period_s: float = 0.0) -> Run:
    """Epochs of half a second; the change, at 30 s, makes one longer by `stall_s`; so is one at `slow_at`."""
    epochs: list[list[Any]] = []
    now, first, migrated = 0.0, 0, 0.0
    while now < 60:
        end, began = int(now * TICKS), now
        moving, slow = began >= 30 and not migrated, slow_at >= 0 and began <= slow_at < began + 0.5
        now += 0.5 + (stall_s if moving or slow else 0.0)
        if end > first:
            epochs.append([len(epochs), first, end, began, now, (now - began) * 1000, 10**6 if moving else 0])
            migrated = now if moving else migrated
        first = end
    leg = {
        "leg": kind, "strategy": variant, "rate": TICKS, "epochs": epochs, "memory": [], "state_bytes": 4_000_000,
        "phases": {"steady": 5.0, "migration": 30.0, "migrated": migrated, "end": now}, "period_s": period_s,
        "plan": {"text": "", "bytes": 2_000_000, "rounds": 1, "epochs": 7}, "later_bytes": 8 * 10**6,
        "breakdown": {"scheduling_s": 0.25, "preparing_s": 1.5, "fetching_s": 0.35, "loading_s": 0.75,
                      "sources": {"cache": 5 * 10**6, "replica": 6 * 10**6, "store": 7 * 10**6}},
    }  # fmt: skip
    trial = json.loads(json.dumps(dataclasses.asdict(asked(kind, query, variant))))
    return {"asked": trial, "round": 0, "seconds": 1.0, "found": {"legs": [leg]}}


def test_a_target_compares_a_change_with_an_equal_time_without_it() -> None:
    runs = [
        a_run("balance", "nbq8", "prepared", 0.2),
        a_run("balance", "nbq8", "store", 4.0),
        a_run("out", "nbq8", "prepared", 9.0),
    ]
    found = {judgement.target.text: judgement for judgement in judged(runs, ("balance",), ("prepared", "adapt"))}
    of_nbq8 = found["balance, nbq8, prepared, with replicas: max latency / steady max"]
    assert of_nbq8.found == pytest.approx(1.2, abs=0.03)  # records wait for the epoch before theirs, and their own
    assert sum(judgement.found is None for judgement in found.values()) == len(found) - 1 == 8


def test_a_query_that_balances_itself_is_held_to_how_many_epochs_that_takes() -> None:
    runs = [a_run("balance", "nbq8", "adapt", 0.2), a_run("balance", "nbq8", "prepared", 0.2)]
    found = [each for each in judged(runs, ("balance",), ("prepared", "adapt")) if each.target.unit == " epochs"]
    assert [(each.found, each.verdict) for each in found if each.found is not None] == [(7.0, "reached")]
    console = Console(record=True, width=160)
    rhino_report.show(console, runs, False, ("balance",), ("prepared", "adapt"))
    assert "7.00 epochs   ≤ 20 epochs   ≤ 5 epochs" in console.export_text()


def test_with_changing_rates_the_same_part_of_the_period_before_is_steady() -> None:
    stalled = a_run("rates", "nbq8", "prepared", 1.0, slow_at=20.0, period_s=10.0)
    elsewhere = a_run("rates", "nbq8", "prepared", 1.0, slow_at=25.0, period_s=10.0)
    assert [round(each.migrating.most / each.steady.most, 1) for each in changes([stalled])] == [1.0]
    assert [round(each.migrating.most / each.steady.most, 1) for each in changes([elsewhere])] == [2.0]


def test_tables_and_pictures_show_all_that_was_measured(tmp_path: Path) -> None:
    runs = [a_run("out", query, variant, 0.2) for query in NAMES for variant in ("prepared", "store")]
    runs.append(a_run("up", "nbq8", "prepared", 0.2))
    runs.append({**a_run("up", "nbq5", "store", 0.2), "found": {}, "failed": "no room"})
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps({"quick": False, "runs": runs}))
    result = CliRunner().invoke(scaling.main, ["--from", str(path)])
    assert result.exit_code == 0, result.output
    for words in ("nbqx, store only (RhinoDFS)", "Scale up", "no room", "0.25 s", "0.35 s", "7.0 MB", "8 MB"):
        assert words in result.output
    assert {each.name for each in tmp_path.glob("*.png")} == {"earlier-out.png", "earlier-up.png"}


def test_pictures_of_changing_rates_and_of_a_query_that_balances_itself(tmp_path: Path) -> None:
    run = a_run("rates", "nbq8", "prepared", 0.2, period_s=12.0)
    run["asked"].update(levels=4, step_s=2.0)
    for shown, runs in ((rates.main, [run]), (balance.main, [a_run("balance", "nbq5", "adapt", 0.2)])):
        path = tmp_path / f"{shown.name}.json"
        path.write_text(json.dumps({"quick": True, "runs": runs}))
        assert CliRunner().invoke(shown, ["--from", str(path)]).exit_code == 0
    assert {each.name for each in tmp_path.glob("*.png")} == {"rates-rates.png", "balance-balance.png"}


def test_a_round_runs_every_query_with_every_variant() -> None:
    given = {"queries": NAMES, "variants": ("prepared", "store"), "state_mb": None, "strategy": "fluid", "bins": 64,
             "rate": 100.0, "workers": 4, "limit": 0, "warm_s": 1.0, "hold_s": 1.0}  # fmt: skip
    chosen = trials(given, ("out", "up"))
    assert len({(trial.kind, trial.query, trial.variant) for trial in chosen}) == len(chosen) == 12
    assert {trial.query: trial.state_bytes for trial in chosen}["nbq5"] < 10_000_000


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--queries", "nbq9"], "nbq9"),
        (["--strategy", "batched:0"], "batched:N"),
        (["--bins", "100"], "power of two"),
        (["--variants", "spark"], "prepared"),
    ],
)
def test_options_that_make_no_sense_are_refused(options: list[str], words: str) -> None:
    result = CliRunner().invoke(balance.main, options)
    assert result.exit_code == 2
    assert words in result.output


def test_an_odd_number_of_workers_is_refused() -> None:
    with pytest.raises(Exception, match="odd"):
        trials({"workers": 3}, ("out",))


def test_the_commands_are_listed() -> None:
    known = benchmarks(ROOT)
    assert {"scaling", "balance", "rates", "recovery"} <= set(known)
    assert not {"rhino_command", "trial_command", "rhino_trials"} & set(known)


def test_all_benchmarks_of_trials_have_the_same_options() -> None:
    for each in (scaling.main, balance.main, rates.main, recovery.main):
        known = {parameter.name for parameter in each.params}
        assert {"rounds", "timeout", "quick", "name", "earlier"} <= known


def test_a_smoke_run_decides_what_was_not_given() -> None:
    seen: list[dict[str, Any]] = []
    options = [number("workers", int, 4, ""), number("warm warm_s", float, 20.0, ""), number("limit", int, 1, "")]
    described = Benchmark(
        "x", "", "", options, {"workers": 2, "warm_s": 1.0}, lambda asked: seen.append(asked) or [],
        lambda runs: [], lambda console, runs, quick: None,
    )  # fmt: skip
    assert CliRunner().invoke(command(described), ["--quick", "--workers", "8"]).exit_code == 0
    assert seen == [{"workers": 8, "warm_s": 1.0, "limit": 1}]


@pytest.mark.parametrize("query", NAMES)
def test_the_longest_window_closes_with_the_fill_or_not_at_all(query: str) -> None:
    work = workload(query, 1_000_000, 1000.0)
    at = work.fill if query == "nbq5" else work.fill + 1000 * LIVE_S
    first, last = (generate(work.given, "auctions", each, each + work.given.turn)["ts"][0].as_py() for each in (0, at))
    assert last - first == pytest.approx(timedelta(seconds=WINDOWS_S[query]), rel=0.05)
    assert work.closing[1] - work.closing[0] == work.given.turn


@pytest.mark.parametrize("query", NAMES)
def test_the_end_of_the_stream_closes_all_windows_of_what_was_handed_over(query: str) -> None:
    work, nexmark = workload(query, 100_000, 10.0), QUERIES[query]
    end = work.fill * 5 // 4
    sim = Simulated(nexmark.build(), nexmark.schemas, open_store("memory://"))
    handed = [(0, work.fill), (work.fill, end), work.closing]
    for first, stop in handed:
        sim.feed(**{kind: rows_of(generate(work.given, kind, first, stop)) for kind in nexmark.reads})
    events = {
        kind: [row for each in handed for row in generate(work.given, kind, *each).to_pylist()]
        for kind in nexmark.reads
    }
    assert Counter(sim.outputs("out")) == Counter(map(tuple, ORACLES[query](events)))


def test_a_rate_goes_up_and_down_again() -> None:
    pace = Pace(1000.0, 5, 2.0)
    counts = [pace.count(tick) for tick in range(int(pace.period_s * TICKS))]
    assert sorted(set(counts)) == [5, 10, 15, 20, 25]
    assert counts[::80] == [5, 10, 15, 20, 25, 20, 15, 10]
    assert Pace(1000.0).period_s == 0


def tried(trial: Reconfiguration, main: str = MAIN) -> Run:
    """The run of a trial whose answer was right."""
    run: Run = {"asked": dataclasses.asdict(trial), "round": 0}
    run |= run_contender(trial, 240.0, lambda done, of: None, main)
    assert run.get("found", run)["rows"] > 1000
    return run


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MILLSTREAM_KILLED") != "all", reason="takes a minute: MILLSTREAM_KILLED=all")
def test_a_trial_runs_on_spark_and_its_answer_is_checked() -> None:
    run = tried(asked("out", "nbq8", "prepared", workers=2, warm_s=0.5, hold_s=1.0))
    [change] = changes([run])
    assert change.migrating.total > 0
    assert change.facts["plan"]["bytes"] > 0
    assert sum(change.facts["breakdown"]["sources"].values()) > 0
    console = Console(record=True, width=160)
    rhino_report.show(console, [run], True, ("out", "up"), ("prepared",))
    assert "nbq8, prepared, with replicas" in console.export_text()


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("MILLSTREAM_KILLED") != "all", reason="takes a minute: MILLSTREAM_KILLED=all")
def test_an_executor_is_killed_and_the_answer_is_right() -> None:
    trial = asked("kill", "nbq8", "prepared", workers=2, warm_s=0.5, hold_s=1.0)
    [killed] = tried(trial, recovery.MAIN)["found"]["kills"]
    assert killed["recovery_s"] > 0
