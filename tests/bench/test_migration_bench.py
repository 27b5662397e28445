"""What the migration benchmark makes of raw facts: windows, ratios, targets, tables and pictures. No Spark."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import migration, migration_report, routing_cost
from bench.migration_pictures import draw
from bench.migration_report import MIGRATION_TARGETS, Leg, judged, legs_of
from bench.race import Run
from bench.report import NoRatio
from bench.trials import Rig, cache_settings, settled

RATE = 1000.0
ASKED = migration.Asked(("all-at-once", "fluid", "batched", "matched"), 256, 4, RATE, 8 * 10**8, 4, 10**8, 5, 20, 1.0)


def a_leg(strategy: str, stall_s: float, rounds: int, name: str = "back", peak: int = 1000) -> dict[str, Any]:
    """Epochs of half a second; those of the migration, from 25 s on, take longer by `stall_s`."""
    epochs: list[list[Any]] = []
    now, first, migrated = 0.0, 0, 0.0
    while now < 50 + rounds:
        moving = now >= 25 and len([e for e in epochs if e[3] >= 25]) < rounds
        end, began = int(now * RATE), now
        now += 0.5 + (stall_s if moving else 0.0)
        if end > first:
            epochs.append([len(epochs), first, end, began, now, 500.0, 1_000_000 if moving else 0])
            migrated = now if moving else migrated
        first = end
    memory = [[at / 4, peak if 25 < at / 4 <= migrated else 900, 500] for at in range(int(now * 4))]
    return {
        "leg": name, "strategy": strategy, "rate": RATE,
        "phases": {"warm": 0.0, "steady": 5.0, "migration": 25.0, "migrated": migrated, "end": now},
        "plan": {"text": "a plan", "bytes": rounds * 10**6, "bins": rounds, "rounds": rounds, "epochs": rounds},
        "epochs": epochs, "memory": memory, "state_bytes": 8 * 10**8,
    }  # fmt: skip


def a_run(trial: Any, *legs: dict[str, Any], round_: int = 0, **facts: Any) -> Run:
    asked = json.loads(json.dumps(migration.dataclasses.asdict(trial)))
    found = {"legs": list(legs), "fetch": "up to 100 MB/s per worker", **facts}
    return {"asked": asked, "round": round_, "seconds": 1.0, "found": found}


def everything() -> list[Run]:
    strategies = [a_leg("all-at-once", 5.0, 1), a_leg("fluid", 0.01, 16), a_leg("batched", 0.1, 4, peak=930)]
    both = [leg for name in ("grow", "shrink") for leg in (a_leg("batched", 0.1, 4, name),)]
    sweep = [
        a_run(trial, *[a_leg(name, stall, rounds) for name, stall, rounds in points])
        for trial, points in zip(
            migration.sweep_trials(ASKED, "both", ("fluid", "batched")),
            [[("fluid", 0.01, 4 * n), ("batched", 0.1 + 0.01 * n, n)] for n in (1, 2, 4, 8)],
            strict=True,
        )
    ]
    costs = {"modulo": 20.0, "table": 30.0, "scattered": 90.0}
    return [
        a_run(ASKED.trial("half"), *strategies, filled={"epoch_ns_per_record": 1000.0}),
        a_run(ASKED.trial("rescale"), *both),
        a_run(ASKED.trial("spark", kind="spark"), a_leg("spark", 30.0, 1, "restart")),
        *sweep,
        a_run(ASKED.trial("planning"), planning=[{"seconds": 0.05}, {"seconds": 0.2}]),
        a_run(ASKED.trial("routing"), ns_per_record=costs),
    ]


def leg_of(strategy: str, stall_s: float, rounds: int) -> Leg:
    [leg] = legs_of([a_run(ASKED.trial("half"), a_leg(strategy, stall_s, rounds))])
    return leg


def test_a_record_that_waited_for_the_last_epoch_of_a_migration_counts_for_it() -> None:
    leg = leg_of("all-at-once", 5.0, 1)
    assert leg.duration_s == pytest.approx(5.5)
    # Created just after the migration's epoch began, it waits for all of it, and for the epoch that reads it.
    assert leg.migrating.most == pytest.approx(5.5 + 0.5, abs=0.01)
    assert leg.steady.most == pytest.approx(1.0, abs=0.01)
    assert leg.stall_s == pytest.approx(5.5)
    assert leg.fetched_bytes == 1_000_000


def test_steady_lasts_as_long_as_the_migration() -> None:
    short, long = leg_of("batched", 0.1, 4), leg_of("fluid", 0.5, 40)
    for leg in (short, long):
        assert sum(until - since for since, until in leg.quiet()) == pytest.approx(leg.until_s - leg.began_s)
    assert len(short.quiet()) == 1
    assert len(long.quiet()) == 2
    assert long.steady.total == pytest.approx(long.migrating.total, rel=0.1)
    assert long.steady.most == pytest.approx(1.0, abs=0.01), "what the migration did is not in it"


def test_targets_compare_the_right_numbers() -> None:
    found = {item.target.text: item.found for item in judged(everything())}
    assert len(found) == len(MIGRATION_TARGETS)
    values = list(found.values())
    batched, steady, at_once = 0.6 + 0.6, 1.0, 6.0
    assert values[0] == pytest.approx(0.6 / 30.5, rel=0.01)
    assert values[1] == pytest.approx(batched / steady, rel=0.01)
    assert values[2] == pytest.approx(batched / at_once, rel=0.01)
    assert values[3] == pytest.approx((0.68 + 0.68) / (0.61 + 0.5), rel=0.01)
    assert values[4] == pytest.approx(1.0, rel=0.02)
    assert values[5] == pytest.approx(930 / 900)
    assert values[6] == 0.2
    assert values[7] == pytest.approx(1000 / 990)
    assert values[8] == pytest.approx(1000 / 930)


def test_what_was_not_measured_or_failed_has_no_ratio_and_says_why() -> None:
    failed: Run = {**a_run(ASKED.trial("half")), "failed": "no room"}
    del failed["found"]
    verdicts = [item.verdict for item in judged([failed])]
    assert verdicts[0] == "no result: rescale, batched: not measured"
    assert verdicts[1] == "no result: half, batched: no room"
    with pytest.raises(NoRatio):
        migration_report.of([], "half", "batched")


def test_a_migration_to_a_warm_cache_gives_no_verdict() -> None:
    warm = a_leg("batched", 0.1, 4)
    for epoch in warm["epochs"]:
        epoch[6] //= 10
    verdict = judged([a_run(ASKED.trial("half"), warm)])[1].verdict
    assert verdict == "no result: back, batched: 4 MB moved, 0 MB fetched: not cold"


def test_a_steady_time_that_was_not_steady_gives_no_verdict() -> None:
    noisy = a_leg("batched", 0.1, 4)
    for epoch in noisy["epochs"]:
        if epoch[4] <= 22:
            epoch[4] += 2.9  # committed that much later than they should have been
    verdict = judged([a_run(ASKED.trial("half"), noisy)])[1].verdict
    assert verdict.startswith("no result: 0.")
    assert "not quiet" in verdict


def test_a_query_has_settled_once_nothing_is_left_of_a_backlog() -> None:
    rows = a_leg("all-at-once", 5.0, 1)["epochs"]
    behind = [row for row in rows if row[4] <= 32]
    assert settled([row for row in rows if row[4] <= 25], RATE)
    assert not settled(behind, RATE), "records of the long epoch were committed just now"
    assert settled(rows, RATE)
    assert not settled(rows[:3], RATE), "too few to tell"


def test_a_sweep_goes_up_to_what_is_asked_for_and_keeps_the_size_of_a_bin() -> None:
    both = migration.sweep_trials(ASKED, "both", ("fluid",))
    assert [(trial.state_bytes, trial.bins) for trial in both] == [
        (10**8, 32),
        (2 * 10**8, 64),
        (4 * 10**8, 128),
        (8 * 10**8, 256),
    ]
    assert {trial.bins for trial in migration.sweep_trials(ASKED, "state", ())} == {256}
    assert {trial.state_bytes for trial in migration.sweep_trials(ASKED, "bins", ())} == {8 * 10**8}


def test_a_trial_goes_on_from_the_largest_kept_store_that_is_not_too_large(tmp_path: Path) -> None:
    (tmp_path / "bases").mkdir()
    for folder, (size, bins) in enumerate([(10**8, 32), (2 * 10**8, 64), (10**9, 64), (10**8, 512)]):
        rig = Rig(ASKED.trial("half", bases=str(tmp_path / "bases")), tmp_path / str(folder))
        (rig.folder / "store").mkdir(parents=True)
        (rig.folder / "store" / "object").write_text(f"{size}")
        rig._keep_base({"asked_bytes": size, "bins": bins})
    for wanted, bins, found in ((4 * 10**8, 256, 2 * 10**8), (10**8, 64, 10**8), (10**9, 64, 10**9), (10**7, 64, None)):
        trial = ASKED.trial("half", bases=str(tmp_path / "bases"), state_bytes=wanted, bins=bins)
        rig = Rig(trial, tmp_path / f"of-{wanted}")
        rig.folder.mkdir()
        assert rig._take_base().get("asked_bytes") == found
        assert (rig.folder / "store").exists() == (found is not None)
    assert Rig(ASKED.trial("half"), tmp_path)._take_base() == {}


def test_the_limit_of_fetches_is_one_for_all_workers(tmp_path: Path) -> None:
    settings, told = cache_settings(ASKED.trial("half", fetch_limit=125_000_000), tmp_path)
    assert settings["fetch_limit"] == 31_250_000
    assert told == "up to 125 MB/s in all, 31 per worker"


def test_each_round_begins_with_another_strategy() -> None:
    orders = [migration.trials(ASKED, ["half"], [], round_)[0].strategies for round_ in range(4)]
    assert {order[0] for order in orders} == set(ASKED.strategies)
    assert all(set(order) == set(ASKED.strategies) for order in orders)


def test_tables_and_pictures_show_all_that_was_measured(tmp_path: Path) -> None:
    out = io.StringIO()
    runs = everything()
    migration_report.show(Console(file=out, width=200), runs)
    text = out.getvalue()
    for part in ("all at once", "fluid", "batched", "Spark: stop, repartition, restart", "in proportion", "Targets"):
        assert part in text
    assert "fetches: up to 100 MB/s per worker" in text
    written = {path.name for path in draw(runs, tmp_path, "x")}
    assert written == {
        "x-half-timeline.png", "x-half-ccdf.png", "x-half-memory.png", "x-rescale-grow-timeline.png",
        "x-rescale-grow-ccdf.png", "x-rescale-grow-memory.png", "x-rescale-shrink-timeline.png",
        "x-rescale-shrink-ccdf.png", "x-rescale-shrink-memory.png", "x-sweep-both.png", "x-spark.png",
    }  # fmt: skip
    assert draw([], tmp_path, "none") == []


def test_earlier_files_are_shown_together(tmp_path: Path) -> None:
    runs = everything()
    for name, some in (("a", runs[:1]), ("b", runs[-1:])):
        migration.save(tmp_path / f"{name}.json", {"quick": False}, some)
    given = ["--from", str(tmp_path / "a.json"), "--from", str(tmp_path / "b.json"), "--publish", str(tmp_path)]
    shown = CliRunner().invoke(migration.main, given)
    assert shown.exit_code == 0, shown.output
    assert re.search(r"routed by table / by modulo +1\.01x", shown.output), "it needs both files"
    assert (tmp_path / "a-half-timeline.png").exists()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--bins", "100"], "not a power of two"),
        (["--workers", "3"], "odd"),
        (["--only", "nothing"], "nothing"),
        (["--strategies", "batched,none"], "none"),
        (["--steps", "1,3"], "growing powers of two"),
        (["--steps", "8,1"], "growing powers of two"),
    ],
)
def test_wrong_options_are_refused(args: list[str], told: str) -> None:
    refused = CliRunner().invoke(migration.main, args)
    assert refused.exit_code == 2
    assert told in refused.output


def test_routing_is_measured_with_all_tables_and_gives_each_slot_its_records() -> None:
    found = routing_cost.measure(records=2000, runs=1)
    assert {"modulo", "table", "scattered"} <= set(found["ns_per_record"])
    assert len(routing_cost.scattered().firsts) == 1 << routing_cost.BIN_BITS
