"""The recovery benchmark makes the right numbers of what its trials found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from bench.recovery import judged, show, trials
from bench.recovery_pictures import draw

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


def test_every_target_is_a_ratio_of_medians() -> None:
    runs = [
        run("kill", "replica", 64, kill(1.0, 2.0, 9.0)),
        run("kill", "replica", 4000, kill(2.2)),
        run("kill", "store", 4000, kill(33.0)),
        run("kill", "spark", 64, kill(11.0)),
        run("handover", "replica", 64, {"legs": [{"stall_s": 1.0, "steady_s": 1.0, "cut_over_s": 0.5, "fetched": 0}]}),
        run(
            "handover", "replica", 4000, {"legs": [{"stall_s": 1.2, "steady_s": 1.0, "cut_over_s": 0.7, "fetched": 0}]}
        ),
        run("throughput", "replica", 64, {"records": 100, "epochs_s": [9.0, 9.0, 9.0, 2.0, 2.0]}),
        run("throughput", "store", 64, {"records": 100, "epochs_s": [9.0, 9.0, 9.0, 1.9, 1.9]}),
    ]
    found = [judgement.found for judgement in judged(runs)]
    assert found == [pytest.approx(each) for each in (1.4, 1.2, 1.2, 1.1, 1 / 15, 0.2, 0.95)]
    console = Console(record=True, width=160)
    show(console, runs)
    assert "33.00 s" in console.export_text()


def test_what_was_not_measured_has_no_ratio() -> None:
    assert all(judgement.found is None for judgement in judged([]))


def test_a_round_compares_a_small_state_with_a_large_one_and_replicas_with_the_store() -> None:
    chosen = trials({**GIVEN, "bases": ""}, ("kill", "spark", "handover", "throughput"), 64, 4000, 64)
    assert len({(trial.kind, trial.variant, trial.state_bytes) for trial in chosen}) == len(chosen) == 10


def test_time_and_bytes_are_broken_down_and_kills_are_drawn(tmp_path: Path) -> None:
    killed = {
        "recovery_s": 1.0, "noticed_s": 0.2, "steady_s": 0.5, "fetched": 3_000_000, "at": 10.0, "planned_s": 0.37,
        "parts_ms": {"fetch": 250.0, "load": 110.0}, "sources": {"replica": 5_000_000, "store": 3_000_000},
    }  # fmt: skip
    epochs = [[number, 10 * number, 10 * number + 10, float(number), number + 1.5, 900.0, 0] for number in range(30)]
    told = {"scheduling_s": 0.02, "preparing_s": 7.5, "fetching_s": 0.0, "loading_s": 0.04, "sources": {"cache": 10**6}}
    runs = [
        run("kill", "replica", 4000, {"kills": [killed], "epochs": epochs, "rate": 10.0}),
        run("handover", "replica", 4000, {
            "legs": [{"stall_s": 1.0, "steady_s": 1.0, "cut_over_s": 0.5, "fetched": 0, "breakdown": told}],
        }),
    ]  # fmt: skip
    console = Console(record=True, width=160)
    show(console, runs)
    text = console.export_text()
    for number in ("0.37 s", "0.25 s", "0.11 s", "5.0 MB", "3.0 MB", "7.50 s", "0.04 s", "1.0 MB"):
        assert number in text
    [path] = draw(runs, tmp_path, "some")
    assert path.stat().st_size > 10_000
    assert draw([], tmp_path, "none") == []
