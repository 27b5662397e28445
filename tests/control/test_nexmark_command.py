"""`millstream nexmark`: what it takes, what it refuses, and what it calls a success. It runs in tests/spark."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from millstream.control.cli import main
from millstream.control.nexmark_run import Outcome, Request, _as_json, _check_folder, strategy_of
from millstream.errors import UserError


def run(*args: str) -> Result:
    return CliRunner().invoke(main, ["nexmark", *args])


def test_help_names_every_option() -> None:
    result = run("--help")
    assert result.exit_code == 0
    for option in ("--events", "--per-epoch", "--rate", "--slots", "--rescale", "--store", "--master", "--json"):
        assert option in result.stdout


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["q9"], "q9"),
        (["q5", "--rescale", "4"], "such as 5:4"),
        (["q5", "--rescale", "4:0"], "such as 5:4"),
        (["q5", "--strategy", "batched:0"], "batched:N"),
        (["q5", "--strategy", "slow"], "all-at-once"),
        (["q5", "--events", "49"], "--events"),
        (["q5", "--slots", "0"], "--slots"),
        (["q5", "--rate", "0"], "--rate"),
    ],
)
def test_wrong_usage_is_told_with_what_is_right(args: list[str], text: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert text in result.stderr


def test_a_query_is_dilated_as_in_the_paper_unless_one_says_otherwise() -> None:
    assert [Request(name, 1000).parameters.dilation for name in ("q4", "q5", "q8")] == [1, 60, 79]
    assert Request("q5", 1000, dilation=2).parameters.dilation == 2


def test_in_an_open_loop_event_time_goes_as_the_clock_does() -> None:
    assert Request("q4", 1000, rate=500).parameters.events_to_us(500) == 1_000_000
    assert Request("q4", 1000).parameters.events_per_second == 10_000


@pytest.mark.parametrize(
    ("outcome", "good"),
    [
        (Outcome(rows=3, expected=3), True),
        (Outcome(rows=3, expected=None), True),
        (Outcome(rows=0, expected=0), False),
        (Outcome(rows=2, expected=3, missing=["a=1"]), False),
        (Outcome(rows=4, expected=3, unexpected=["a=1"]), False),
    ],
)
def test_a_result_is_good_if_it_is_the_twins_and_not_empty(outcome: Outcome, good: bool) -> None:
    assert outcome.good is good
    told = json.loads(_as_json(Request("q5", 1000), outcome, []))
    assert told["verified"] is (None if outcome.expected is None else good)


def test_a_folder_goes_on_with_the_same_events_only(tmp_path: Path) -> None:
    _check_folder(tmp_path / "run", Request("q5", 1000))
    _check_folder(tmp_path / "run", Request("q5", 1000, slots=8, verify=False))
    with pytest.raises(UserError, match="of another run: query, parameters differ"):
        _check_folder(tmp_path / "run", Request("q4", 2000))


def test_strategies_go_by_their_names() -> None:
    names = ("all-at-once", "fluid", "matched", "batched:16")
    assert [str(strategy_of(name)) for name in names] == ["AllAtOnce()", "Fluid()", "Matched()", "Batched(16)"]
