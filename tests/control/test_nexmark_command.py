"""`millstream nexmark`: what it takes, what it refuses, and what it calls a success. It runs in tests/spark."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner, Result

from millstream.control.cli import main
from millstream.control.display import PlainDisplay
from millstream.control.nexmark_run import Outcome, Request, Rescaling, _as_json, _check_folder, _Run, strategy_of
from millstream.errors import ConflictError, UserError
from millstream.nexmark import QUERIES
from millstream.nexmark.parameters import END, START


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


class Rescaled:
    """A running query that notes how it was rescaled. A rescale takes `takes` epochs."""

    def __init__(self, takes: int) -> None:
        self.takes, self.epoch, self.slots, self.asked = takes, -1, 2, list[tuple[int, int, str]]()
        self.over, self.refused = False, False

    def status(self) -> Any:
        return SimpleNamespace(slots=self.slots, watermarks={"bids": END if self.over else START})

    def plan_rescale(self, slots: int, strategy: Any) -> Any:
        return SimpleNamespace(slots=slots, strategy=strategy, rounds=(() if slots == self.slots else ((),)))

    def apply(self, plan: Any) -> Any:
        self.asked.append((self.epoch, plan.slots, str(plan.strategy)))
        until = self.epoch + self.takes

        def state() -> Any:
            if self.epoch < until:
                return SimpleNamespace(state="running")
            self.slots = plan.slots
            return SimpleNamespace(state="refused" if self.refused else "done")

        def wait() -> None:
            if self.refused:
                raise ConflictError("the plan is stale")

        return SimpleNamespace(progress=state, wait=wait)


def rescaling_run(rescalings: list[Rescaling], out: io.StringIO) -> _Run:
    display, asked = PlainDisplay(out, "title", 10), Request("q5", 1000, strategy="batched:8")
    return _Run(None, QUERIES["q5"], asked, Path(), rescalings, display)  # type: ignore[arg-type]


def test_rescales_begin_after_their_epoch_one_after_the_other_and_their_end_is_noted() -> None:
    rescalings, out, running = [Rescaling(2, 4), Rescaling(3, 1)], io.StringIO(), Rescaled(takes=3)
    run = rescaling_run(rescalings, out)
    for epoch in range(12):
        running.epoch, running.over = epoch, epoch >= 7
        run._look_at_rescalings(running, epoch)
    assert running.asked == [(2, 4, "Batched(8)"), (5, 1, "Batched(8)")]
    assert [each.told for each in rescalings] == [
        {"after": 2, "slots": 4, "began_in": 2, "ended_in": 5, "before_the_end": True},
        {"after": 3, "slots": 1, "began_in": 5, "ended_in": 8, "before_the_end": False},
    ]
    assert "epoch 5: there are 4 slots now" in out.getvalue()


def test_a_rescale_that_is_refused_ends_the_run_with_the_reason() -> None:
    running = Rescaled(takes=1)
    running.refused = True
    run = rescaling_run([Rescaling(0, 4)], io.StringIO())
    running.epoch = 0
    run._look_at_rescalings(running, 0)
    running.epoch = 1
    with pytest.raises(ConflictError, match="stale"):
        run._look_at_rescalings(running, 1)
