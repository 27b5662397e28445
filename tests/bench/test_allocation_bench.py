"""The benchmark of allocation runs, in small, and its numbers are shares."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.allocation import BUSY, PERIODS, WAYS, Airline, airline, main, measure, pair, ratios


def test_it_runs_and_writes_what_it_found(tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    asked = ["--groups", "16", "--seeds", "2", "--bins", "300", "--workers", "12", "--no-variants", "--json", str(file)]
    done = CliRunner().invoke(main, asked, catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(file.read_text())
    assert {row["job"] for row in found["rows"]} == {"pair", "airline, 16 bins"}
    assert len(found["rows"]) == 2 * 2 * len(WAYS)
    for row in found["rows"]:
        assert 0 <= row["assisted"] <= 1
        assert 0 <= row["usable"] <= 1
        assert row["moves"] > 0
        assert row["replicas"] > 0
    assert set(WAYS) <= set(found["scale"]["seconds"])
    assert "correlated" in done.output


def test_the_same_seed_gives_the_same_numbers() -> None:
    assert measure([16], 1, variants=False) == measure([16], 1, variants=False)


def test_all_replicas_of_the_pair_are_where_the_paper_says() -> None:
    rows = measure([16], 3, variants=False)
    assert [row["usable"] for row in rows if row["job"] == "pair" and row["way"] == "correlated"] == [1.0] * 3
    assert min(ratios(rows, "pair", "usable", "correlated")) > 1
    job = pair(0)
    assert np.corrcoef(job.load[job.primary == 1].sum(axis=0), job.load[job.primary == 2].sum(axis=0))[0, 1] < -0.99


@pytest.mark.parametrize("key", ["flight", "airport"])
def test_the_stand_in_has_the_correlations_that_the_paper_names(key: str) -> None:
    job = airline(1, Airline(groups=16, key=key))
    assert job.load.shape == (64, PERIODS)
    busy = job.load[job.primary < BUSY].sum(axis=0)
    sampling = job.load[job.primary >= BUSY].sum(axis=0)
    halves = [job.load[(job.primary % 2 == half) & (job.primary < BUSY)].sum(axis=0) for half in (0, 1)]
    assert np.corrcoef(*halves)[0, 1] > 0.9, "operators 1 to 3 rise and fall together"
    assert abs(np.corrcoef(busy, sampling)[0, 1]) < 0.4, "operator 4 has nothing to do with them"
