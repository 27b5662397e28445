"""What the modification benchmark makes of raw facts: epochs to effect, ratios, tables and pictures. No Spark."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from bench import modification, modification_report
from bench.migration_report import legs_of
from bench.modification_report import epochs_to_effect, judged, rates
from bench.modification_trials import Trial
from bench.race import Run

RATE = 1000.0


def a_leg(name: str, extra_s: float, prepared: float = 25.2) -> dict[str, Any]:
    """Epochs of half a second; the change is asked for at 25 s and takes effect in the next that begins once it is
    prepared, which takes longer."""
    epochs: list[list[Any]] = []
    now, first, effect = 0.0, 0, -1
    while now < 50:
        end, began = int(now * RATE), now
        takes_effect = effect < 0 and began >= prepared
        now += 0.5 + (extra_s if takes_effect else 0.0)
        if end > first:
            effect = len(epochs) if takes_effect else effect
            epochs.append([len(epochs), first, end, began, now, 500.0, 0])
        first = end
    planned, committed = epochs[effect][3], epochs[effect][4]
    return {
        "leg": name, "strategy": name, "rate": RATE,
        "phases": {"steady": 5.0, "migration": 25.0, "migrated": committed, "end": now},
        "events": {"asked": 25.0, "heard": 25.0, "validated": 25.1, "prepared": prepared, "planned": planned,
                   "committed": committed},
        "outcome": {"began": effect, "last": effect, "text": "insert few"},
        "plan": {"text": "", "bytes": 0, "bins": 0, "rounds": 1, "epochs": 1},
        "epochs": epochs, "memory": [], "state_bytes": 10**6,
    }  # fmt: skip


def a_run(kind: str, *legs: dict[str, Any], **found: Any) -> Run:
    asked = modification._asked(Trial(kind, kind, kind, RATE, 4, 5, 20))
    return {"asked": asked, "round": 0, "seconds": 1.0, "found": {"legs": list(legs), **found}}


def everything() -> list[Run]:
    restart = a_leg("application", 12.0)
    restart["events"] = {"asked": 25.0, "stopped": 27.0, "committed": restart["events"]["committed"]}
    converting = {"steady": [[1.0, 100.0]], "after": [[1.0, 100.0]], "during": [[1.0, 80.0], [1.0, 90.0]]}
    return [
        a_run("smq", a_leg("insert", 0.05), a_leg("replace", 0.1)),
        a_run("q8", a_leg("insert", 0.05)),
        a_run("spark", restart),
        a_run("convert", **converting, bytes=[10**9, 0], seconds=20.0, state_bytes=10**9),
    ]


def test_epochs_to_effect_are_those_that_were_planned_after_it_was_prepared() -> None:
    [leg, late] = legs_of([a_run("smq", a_leg("insert", 0.05), a_leg("insert", 0.05, prepared=25.0))])
    assert epochs_to_effect(leg) == 1
    assert epochs_to_effect(late) == 1
    late.facts["outcome"]["began"] += 2
    assert epochs_to_effect(late) == 3


def test_targets_are_judged_by_what_was_measured() -> None:
    found = {judgement.target.text: judgement for judgement in judged(everything())}
    latency, epochs, stall, throughput = found.values()
    assert latency.found == pytest.approx(1.1, abs=0.05)
    assert (epochs.found, epochs.verdict) == (1.0, "aim reached")
    assert stall.found == pytest.approx(0.6 / 12.5)
    assert stall.verdict == "reached"
    assert throughput.found == pytest.approx(0.85)
    assert throughput.verdict == "reached"
    assert {judgement.verdict for judgement in judged([])} == {"no result: not measured"}


def test_a_conversion_that_did_not_end_has_no_ratio() -> None:
    runs = everything()
    runs[-1]["found"]["bytes"] = [10**9, 10**8]
    assert judged(runs)[-1].verdict == "no result: 100 MB were left when the time was over"
    assert rates(runs[-1]) == (100.0, 85.0)


def test_tables_and_pictures_show_all_that_was_measured(tmp_path: Path) -> None:
    out = io.StringIO()
    modification_report.show(Console(file=out, width=200), everything())
    for part in ("Stateful map query", "A filter is inserted", "NEXMark Q8", "as an application, with new executors",
                 "Conversion of 1,000 MB", "Targets"):  # fmt: skip
        assert part in out.getvalue()
    written = {path.name for path in modification_report.draw(everything(), tmp_path, "x")}
    assert written == {"x-smq.png", "x-q8.png", "x-spark.png"}


def test_earlier_files_are_shown_together(tmp_path: Path) -> None:
    runs = everything()
    for name, some in (("a", runs[:2]), ("b", runs[2:])):
        modification.save(tmp_path / f"{name}.json", {"quick": False}, some)
    given = ["--from", str(tmp_path / "a.json"), "--from", str(tmp_path / "b.json"), "--publish", str(tmp_path)]
    shown = CliRunner().invoke(modification.main, given)
    assert shown.exit_code == 0, shown.output
    assert "aim reached" in shown.output
    refused = CliRunner().invoke(modification.main, ["--only", "nothing"])
    assert refused.exit_code == 2
