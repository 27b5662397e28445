"""The verbs on the command line: what they print, what they change, and with which code they end."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import millstream as ms
from millstream.control import connect as connect_module
from millstream.control import handle, watch
from millstream.control.cli import main
from millstream.control.connect import Control
from millstream.control.control_commands import COMMANDS
from millstream.control.overview import Overview, Pulse, driver_gone
from millstream.protocol.epochs import Attempt, Epoch, History, Plan
from millstream.protocol.routing import RoutingTable
from millstream.protocol.steering import STATES, Cancel, Outcome
from millstream.protocol.strategies import PROTOCOLS
from millstream.store import names
from millstream.store.control_log import ControlLog
from millstream.store.journal import JournalReader
from millstream.store.objects import open_store
from millstream.testing import Simulated
from words import WORDS, files, running, simulated


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLSTREAM_TOKEN", raising=False)


@pytest.fixture
def sim(tmp_path: Path) -> Simulated:
    made = simulated(open_store(str(tmp_path)), workers=("a", "b"))
    made.feed(words=WORDS)
    return made


@pytest.fixture
def replicated(tmp_path: Path) -> Simulated:
    """Each of its slots has a replica; workers fetch so slowly that it matters how state changes hands."""
    (tmp_path / "store").mkdir()
    store, caches = open_store(str(tmp_path / "store")), tmp_path / "caches"
    made = simulated(store, workers=("a", "b"), cache_dir=caches, replicas=1, fetch_limit=100)
    for _ in range(3):
        made.feed(words=WORDS)
    return made


def run(verb: str, sim: Simulated | Path, *args: str, code: int = 0) -> Result:
    """A verb on a store; the test fails if it ends with another code."""
    store = str(sim) if isinstance(sim, Path) else sim.store.uri
    result = CliRunner().invoke(main, [verb, store, *args])
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return result


def told(result: Result) -> Any:
    """The one JSON object on standard output."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def drawn(overview: Overview, outcomes: Sequence[Outcome] = (), width: int = 100) -> str:
    """The picture as it is in a terminal of this width."""
    console = Console(width=width, force_terminal=True, record=True, file=io.StringIO())
    console.print(watch.picture(overview, outcomes, width))
    return console.export_text()


def table(sim: Simulated) -> RoutingTable:
    """As the store has it: a command is over once it is committed, a moment before the driver knows that it is."""
    return JournalReader.look(sim.store).history.tables["count"]


# -- looking


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: str(command.name))
def test_every_verb_says_what_it_does(command: Any) -> None:
    result = CliRunner().invoke(main, [command.name, "-h"])
    assert result.exit_code == 0
    assert f"{command.name} [OPTIONS] STORE" in result.stdout
    assert command.name in main.commands
    assert all(option.help for option in command.params if option.param_type_name == "option")


def test_the_status_names_what_an_operator_asks_for(sim: Simulated) -> None:
    text = run("status", sim).stdout
    for expected in ("query      words", "epoch      0, last write", "worker     a: slot 0", "worker     b: slot 1"):
        assert expected in text
    status = told(run("status", sim, "--json"))
    assert (status["name"], status["epoch"], sorted(status["slots"])) == ("words", 0, ["0", "1"])
    assert status["workers"] == {"a": [0], "b": [1]}
    assert told(run("watch", sim, "--once", "--json"))["epoch"] == 0
    assert "worker     a" in run("watch", sim, "--once").stdout


def test_the_status_says_who_holds_replicas_of_which_slots(replicated: Simulated) -> None:
    for text in (run("status", replicated).stdout, run("watch", replicated, "--once").stdout):
        assert "replicas   each slot on 1 other worker\n" in text
        assert re.search(r"^worker     a: slot 0 [0-9]+ B \(also on b\)$", text, re.MULTILINE)
        assert re.search(r"^worker     b: slot 1 [0-9]+ B \(also on a\)$", text, re.MULTILINE)
    assert told(run("status", replicated, "--json"))["replicas"] == {"0": ["b"], "1": ["a"]}


@pytest.mark.parametrize(
    ("replicas", "expected"),
    [
        ({}, None),
        ({0: (), 1: ()}, None),
        ({0: ("b",), 1: ("a",)}, "each slot on 1 other worker"),
        ({0: ("b", "c"), 1: ("a", "c")}, "each slot on 2 other workers"),
        ({0: ("b", "c"), 1: ("a",)}, "each slot on 1 to 2 other workers"),
        ({0: ("b",), 7: ("a",)}, "each slot on 1 other worker, except slot 1"),
    ],
)
def test_slots_without_a_replica_are_named(
    sim: Simulated, replicas: dict[int, tuple[str, ...]], expected: str | None
) -> None:
    overview = replace(Control(sim.store).status(), replicas=replicas)
    lines = [line for line in watch.lines(overview) if line.startswith("replicas")]
    assert lines == ([] if expected is None else [f"replicas   {expected}"])
    assert ("replicas" in drawn(overview)) == (expected is not None)


def test_a_store_without_a_query_is_an_error_and_stays_empty(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for place in (empty, tmp_path / "nothing"):
        for verb in (["status"], ["watch"], ["commands"], ["rescale", "4"], ["cancel", "0"]):
            assert "there is no" in run(verb[0], place, *verb[1:], code=1).stderr
    error = told(run("status", empty, "--json", code=1))
    assert (error["kind"], error["exit_code"]) == ("UserError", 1)
    assert error["error"].startswith("there is no query in the store")
    assert list(empty.iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty"]


# -- changing


def test_a_dry_run_prints_the_plan_and_changes_nothing(sim: Simulated) -> None:
    before = files(sim.store)
    text = run("rescale", sim, "4", "--dry-run", "--strategy", "batched:8", "--gap", "2", "--no-merge").stdout
    assert text.startswith("rescale by Batched(8, gap=2, merge=False), from routing version 0 of 'count'")
    assert "32 bins" in text
    plan = told(run("rescale", sim, "4", "--dry-run", "--strategy", "batched:8", "--gap", "2", "--no-merge", "--json"))
    assert plan["plan"]["strategy"] == "Batched(8, gap=2, merge=False)"
    assert (plan["plan"]["rounds"], plan["plan"]["epochs"], plan["plan"]["bins"]) == (4, 10, 32)
    assert (plan["dry_run"], plan["command"], plan["outcome"]) == (True, None, None)
    assert files(sim.store) == before


@pytest.mark.parametrize(
    "arguments", ["rescale 4", "move --bins 0-31 --to 1", "drain a", "balance", "split 0", "merge 0 1"]
)
def test_whatever_moves_state_takes_all_that_strategies_take(replicated: Simulated, arguments: str) -> None:
    verb, *rest = arguments.split()
    options = ("--strategy", "fluid", "--gap", "1", "--protocol", "cpa", "--stall", "2", "--deadline", "30.5")
    plan = told(run(verb, replicated, *rest, *options, "--dry-run", "--json"))["plan"]
    assert plan["strategy"] == "Fluid(protocol='cpa', gap=1, stall_s=2, deadline_s=30.5)"
    assert (plan["protocol"], plan["prepared"]) == ("cpa", False)


def test_a_plan_as_json_has_its_protocol_and_what_each_would_cost(replicated: Simulated) -> None:
    by_options = {(): "cpal", ("--prepared",): "cpal", ("--no-prepared",): "direct"}
    for options, protocol in {**by_options, **{("--protocol", name): name for name in PROTOCOLS}}.items():
        dry = ("rescale", replicated, "4", *options, "--dry-run")
        plan = told(run(*dry, "--json"))["plan"]
        assert (plan["protocol"], plan["prepared"]) == (protocol, protocol == "cpal"), options
        assert list(plan["expected"]) == list(PROTOCOLS)
        assert f"{protocol}: {plan['expected'][protocol]} (chosen)" in run(*dry).stdout
    chosen = told(run("rescale", replicated, "4", "--protocol", "auto", "--dry-run", "--json"))["plan"]
    assert chosen["strategy"] == "Paced(1.1, protocol='auto')"
    assert chosen["protocol"] in PROTOCOLS


def test_a_plan_tells_what_each_protocol_would_cost_however_little_that_is(sim: Simulated) -> None:
    plan = told(run("rescale", sim, "4", "--protocol", "auto", "--dry-run", "--json"))["plan"]
    assert list(plan["expected"]) == list(PROTOCOLS)
    assert plan["protocol"] in PROTOCOLS
    assert plan["expected"]["cpal"].startswith("stall under 0.001 s, complete in ")


def test_a_rescale_waits_until_it_is_done(sim: Simulated) -> None:
    with running(sim):
        text = run("rescale", sim, "4", "--timeout", "60").stdout
    assert "rescale by Paced(1.1)" in text
    assert "Sent as command 0." in text
    assert "Command 0 (rescale): done, 1 of 1 rounds, epochs" in text
    assert set(table(sim).slots) == {0, 1, 2, 3}
    with running(sim):
        answer = told(run("rescale", sim, "2", "--strategy", "fluid", "--timeout", "60", "--json"))
    assert (answer["command"], answer["outcome"]["state"]) == (1, "done")
    assert answer["outcome"]["done"] == answer["plan"]["rounds"] == 32
    assert set(table(sim).slots) == {0, 1}
    assert dict(sim.state("count"))["the"] == 4 * (sim.epoch + 1)
    listed = run("commands", sim).stdout
    assert "Command 0 (rescale): done" in listed
    assert "Command 1 (rescale): done, 32 of 32 rounds" in listed
    assert [each["number"] for each in told(run("commands", sim, "--json"))["commands"]] == [0, 1]


def test_bins_ranges_and_shares_of_slots_can_be_moved(sim: Simulated) -> None:
    before = table(sim)
    for arguments in (
        ("--bins", "0-3,7", "--to", "1"),
        ("--range", "f000000000000000-ffffffffffffffff", "--to", "0"),
        ("--from", "0", "--share", "0.25", "--to", "1", "--strategy", "matched", "--step", "count"),
    ):
        answer = told(run("move", sim, *arguments, "--no-wait", "--json"))
        assert answer["outcome"] is None
        while sim.driver.journal.history.outcomes.get(answer["command"]) is None or table(sim) == before:
            sim.feed(words=WORDS)
        while not sim.driver.journal.history.outcomes[answer["command"]].over:
            sim.feed(words=WORDS)
        assert sim.driver.journal.history.outcomes[answer["command"]].state == "done"
        before = table(sim)


def test_a_worker_is_drained_and_slots_are_balanced(sim: Simulated) -> None:
    with running(sim):
        run("drain", sim, "a", "--timeout", "60")
        run("balance", sim, "--timeout", "60")
    assert set(table(sim).slots) == {1}, "slot 0 was on the worker, and is gone"
    assert "no worker 'z'; the query runs on" in run("drain", sim, "z", code=1).stderr


def test_slots_are_split_and_merged_and_bins_get_finer(sim: Simulated) -> None:
    bits = table(sim).bin_bits
    with running(sim):
        run("split", sim, "0", "--into", "3", "--strategy", "all-at-once", "--timeout", "60")
        assert set(table(sim).slots) == {0, 1, 2, 3}
        run("merge", sim, "2", "1", "--timeout", "60")
        assert set(table(sim).slots) == {0, 1, 3}
        finer = told(run("bins", sim, str(2 << bits), "--timeout", "60", "--json"))
    assert finer["outcome"]["state"] == "done"
    assert table(sim).bin_bits == bits + 1
    assert "a power of two" in run("bins", sim, "100", code=1).stderr
    assert "no slot 9" in run("merge", sim, "9", "1", code=1).stderr
    assert "no slot 9" in run("split", sim, "9", code=1).stderr


def test_nothing_to_do_is_no_error(sim: Simulated) -> None:
    before = files(sim.store)
    assert "nothing to move" in run("rescale", sim, "2").stdout
    assert told(run("rescale", sim, "2", "--json"))["command"] is None
    assert files(sim.store) == before


def test_a_command_is_cancelled_by_its_number(sim: Simulated) -> None:
    number = told(run("rescale", sim, "4", "--strategy", "fluid", "--gap", "3", "--no-wait", "--json"))["command"]
    sim.feed(words=WORDS)
    asked = told(run("cancel", sim, str(number), "--no-wait", "--json"))["command"]
    sim.feed(words=WORDS)
    outcomes = sim.driver.journal.history.outcomes
    assert (outcomes[number].state, outcomes[number].done, outcomes[asked].state) == ("cancelled", 1, "done")
    with running(sim):
        refused = run("cancel", sim, str(number), "--timeout", "60", code=1)
    assert f"command {number} (rescale) is not under way: it is cancelled" in refused.stderr


def test_a_stale_plan_is_a_conflict(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = Control.plan_rescale
    plan = ms.connect(sim.store.uri).plan_rescale(8)
    run("rescale", sim, "3", "--no-wait")
    sim.feed(words=WORDS)
    monkeypatch.setattr(Control, "plan_rescale", lambda self, slots, **given: plan)
    with running(sim):
        assert "found 1; plan again" in run("rescale", sim, "8", "--timeout", "60", code=3).stderr
        error = told(run("rescale", sim, "8", "--timeout", "60", "--json", code=3))
    assert (error["kind"], error["exit_code"]) == ("ConflictError", 3)
    monkeypatch.setattr(Control, "plan_rescale", planned)
    with running(sim):
        run("rescale", sim, "8", "--timeout", "60")


def test_without_a_driver_a_command_waits_and_says_so(sim: Simulated) -> None:
    late = run("rescale", sim, "4", "--timeout", "0", code=4)
    assert "command 0 has not been heard yet, after 0 s. No epoch was committed meanwhile" in late.stderr
    assert "stays in the control log" in late.stderr
    error = told(run("drain", sim, "a", "--timeout", "0", "--json", code=4))
    assert (error["kind"], error["exit_code"]) == ("TimeoutError", 4)
    assert "unheard    command 0 (rescale) in the control log" in run("status", sim).stdout
    assert "unheard    command 1 (drain) in the control log" in run("status", sim).stdout
    sim.feed(words=WORDS)
    assert set(table(sim).slots) == {0, 1, 2, 3}


def test_who_stops_waiting_takes_nothing_back(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handle.time, "sleep", lambda seconds: signal.raise_signal(signal.SIGINT))
    stopped = run("rescale", sim, "4", code=130)
    assert "No longer waiting. The command goes on; `millstream cancel STORE 0` ends it." in stopped.stderr
    sim.feed(words=WORDS)
    assert set(table(sim).slots) == {0, 1, 2, 3}


def test_a_plan_may_wait_for_an_epoch_or_a_time(sim: Simulated) -> None:
    run("rescale", sim, "3", "--at", "3", "--no-wait")
    sim.feed(words=WORDS)
    assert "command    0 waiting: 0 of 1 rounds" in run("status", sim).stdout
    while sim.epoch < 3:
        sim.feed(words=WORDS)
    assert sim.driver.journal.history.outcomes[0].began == 3
    assert "epoch 2 is past" in run("rescale", sim, "4", "--at", "2", code=1).stderr
    assert "is past" in run("rescale", sim, "4", "--at", "2020-05-01T12:00", code=1).stderr
    assert "has event time" in run("rescale", sim, "4", "--at", "event:2020-05-01T12:00Z", code=1).stderr
    plan = told(run("rescale", sim, "4", "--at", "2999-05-01T14:00:00+02:00", "--dry-run", "--json"))
    assert plan["plan"]["start"]["clock_ms"] == datetime(2999, 5, 1, 12, tzinfo=UTC).timestamp() * 1000


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["rescale", "0"], "SLOTS"),
        (["rescale", "many"], "SLOTS"),
        (
            ["rescale", "4", "--strategy", "quick"],
            "'quick' is none of paced, paced:SLOWDOWN",
        ),
        (["rescale", "4", "--strategy", "batched:0"], "'batched:0' is none of"),
        (["rescale", "4", "--gap", "-1"], "--gap"),
        (["rescale", "4", "--protocol", "quick"], "'quick' is not one of 'direct', 'cpa', 'cpal', 'auto'"),
        (["rescale", "4", "--protocol", "cpal", "--prepared"], "give --protocol or --prepared (or --no-prepared), not"),
        (
            ["drain", "a", "--protocol", "auto", "--no-prepared"],
            "give --protocol or --prepared (or --no-prepared), not",
        ),
        (["balance", "--stall", "-1"], "--stall"),
        (["balance", "--stall", "inf"], "expected a number of seconds, 0 or more"),
        (["merge", "0", "1", "--deadline", "soon"], "--deadline"),
        (["rescale", "4", "--at", "tomorrow"], "'tomorrow' is neither an epoch"),
        (["rescale", "4", "--timeout", "-1"], "--timeout"),
        (["rescale", "4", "--store-option", "x"], "give KEY=VALUE"),
        (["move", "--to", "1"], "give one of --bins, --range and --from"),
        (["move", "--to", "1", "--bins", "1", "--from", "0"], "give one of --bins, --range and --from"),
        (["move", "--to", "1", "--bins", "1", "--share", "0.5"], "--share goes with --from"),
        (["move", "--to", "1", "--bins", "5-2"], "goes from 5 to 2"),
        (["move", "--to", "1", "--bins", "a"], "give numbers such as"),
        (["move", "--to", "1", "--range", "0-ff"], "two points of 16 hexadecimal digits"),
        (["cancel", "first"], "NUMBER"),
        (["drain"], "WORKER"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_changes_nothing(sim: Simulated, arguments: list[str], reason: str) -> None:
    before = files(sim.store)
    assert reason in run(arguments[0], sim, *arguments[1:], code=2).stderr
    assert files(sim.store) == before


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["rescale", "65"], "give at most 64 slots"),
        (["rescale", "4", "--step", "cuont"], "no step 'cuont'; the query has count"),
        (["move", "--to", "9", "--bins", "1"], "slot"),
        (["move", "--to", "1", "--bins", "64"], "bin"),
        (["move", "--to", "1", "--range", f"{'0' * 16}-{'1' * 16}", "--range", f"{'0' * 16}-{'2' * 16}"], "overlap"),
        (["move", "--to", "1", "--range", f"{'2' * 16}-{'1' * 16}"], "not a range"),
        (["rescale", "4", "--token", "x"], "is not guarded, so a token means nothing"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_makes_no_sense_is_an_error_and_changes_nothing(sim: Simulated, arguments: list[str], reason: str) -> None:
    before = files(sim.store)
    assert reason in run(arguments[0], sim, *arguments[1:], code=1).stderr
    assert reason in told(run(arguments[0], sim, *arguments[1:], "--json", code=1))["error"]
    assert files(sim.store) == before


def test_the_token_comes_from_an_option_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sim = simulated(open_store(str(tmp_path)), token="secret")
    sim.feed(words=WORDS)
    assert "is guarded: give the token" in run("rescale", sim, "3", code=1).stderr
    assert "is not the token" in run("rescale", sim, "3", "--token", "guess", code=1).stderr
    assert run("status", sim).exit_code == 0, "looking needs none"
    run("rescale", sim, "3", "--dry-run")
    run("rescale", sim, "3", "--token", "secret", "--no-wait")
    sim.feed(words=WORDS)
    monkeypatch.setenv("MILLSTREAM_TOKEN", "secret")
    run("rescale", sim, "4", "--no-wait")
    sim.feed(words=WORDS)
    assert set(table(sim).slots) == {0, 1, 2, 3}


def test_what_was_refused_is_listed_with_its_sender(sim: Simulated) -> None:
    assert "No command has been sent." in run("commands", sim).stdout
    sim.store.put(names.command(0), b"hello")
    sim.feed(words=WORDS)
    text = run("commands", sim).stdout
    assert "Command 0 (?): refused: it cannot be read as a command" in text
    assert "the sender is not known" in text


# -- watching


def test_watch_tells_every_change_until_ctrl_c(sim: Simulated, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = 0

    def pause(seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            ControlLog(sim.store).send("cancel", Cancel(5))
        elif looks == 5:
            raise KeyboardInterrupt
        elif looks != 4:
            sim.feed(words=WORDS)

    monkeypatch.setattr(watch.time, "sleep", pause)
    lines = run("watch", sim).stdout.splitlines()
    assert [line.split(";")[0] for line in lines] == ["epoch 0", "epoch 1", "epoch 1", "epoch 2"]
    assert "1 not heard yet" in lines[2]


def test_watch_ends_well_at_ctrl_c_in_a_process_of_its_own(sim: Simulated) -> None:
    command = [sys.executable, "-m", "millstream.control.cli", "watch", sim.store.uri, "--every", "0.05", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:
        assert process.stdout is not None
        first = json.loads(process.stdout.readline())
        sim.feed(words=WORDS)
        second = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGINT)
        rest, errors = process.communicate(timeout=60)
    assert (first["epoch"], second["epoch"], rest) == (0, 1, "")
    assert (process.returncode, errors) == (0, "")


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_picture_shows_slots_workers_and_progress(sim: Simulated, width: int) -> None:
    control = Control(sim.store)
    ControlLog(sim.store).send("cancel", Cancel(7))
    sim.feed(words=WORDS)
    rescaling = control.apply(control.plan_rescale(4, strategy=ms.Batched(8, merge=False)))
    sim.feed(words=WORDS)
    sim.feed(words=WORDS)
    assert rescaling.progress().done == 2
    text = drawn(control.status(), control.commands(), width)
    assert max(map(len, text.splitlines())) <= width
    for expected in ("words", "worker a", "slot 3", "refused"):
        assert expected in text
    if width >= 80:
        assert "running, 2 of 4 rounds" in text


def test_a_watermark_is_shown_with_how_far_it_is_behind() -> None:
    query = ms.Query("timed")
    source = query.source("words", None, event_time="ts", lateness="10 seconds")
    source.key_by("word").count("count")
    start = datetime(2026, 1, 1, tzinfo=UTC)
    sim = Simulated(query, {"words": "word string, ts timestamp"}, now=start + timedelta(seconds=90))
    sim.feed(words=[("a", start + timedelta(seconds=60))])
    text = "\n".join(watch.lines(Control(sim.store).status()))
    assert "watermark  words: 2026-01-01 00:00:50, 40 s behind" in text


def test_a_migration_that_somebody_else_cancels_is_no_success(sim: Simulated) -> None:
    """Whoever goes on only if the drain was done must not go on."""
    results: list[Result] = []

    def ask() -> None:
        results.append(CliRunner().invoke(main, ["rescale", sim.store.uri, "4", "--strategy", "fluid", "--gap", "50",
                                                 "--timeout", "60"]))  # fmt: skip

    thread = threading.Thread(target=ask)
    with running(sim):
        thread.start()
        while not any(outcome.state == "running" for outcome in sim.driver.journal.history.outcomes.values()):
            time.sleep(0.01)
        dry = run("cancel", sim, "0", "--dry-run")
        Control(sim.store).cancel(0)
        thread.join(60)
    assert "Would end: Command 0 (rescale): running" in dry.stdout
    assert results[0].exit_code == 1, results[0].output
    assert "cancelled" in results[0].output
    assert "is not under way: it is cancelled" in run("cancel", sim, "0", "--dry-run", code=1).stderr


@pytest.mark.parametrize("state", STATES)
def test_the_picture_shows_commands_in_every_state(sim: Simulated, state: str) -> None:
    overview, outcome = Control(sim.store).status(), Outcome(3, "modify", state, reason="because")
    assert ("because" in drawn(overview, [outcome])) == outcome.over


@pytest.mark.parametrize("width", [40, 80, 160])
def test_the_picture_shows_replicas(replicated: Simulated, width: int) -> None:
    text = drawn(Control(replicated.store).status(), width=width)
    assert max(map(len, text.splitlines())) <= width
    for expected in ("replicas", "worker a", "slot 1", "(also"):
        assert expected in text
    if width >= 80:
        assert "each slot on 1 other worker" in text
        assert "B (also on b)" in text


# -- without a driver


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """A query whose driver's process has ended a while ago."""
    store = tmp_path / "left"
    code = (
        "import sys, words\n"
        "from millstream.store.objects import open_store\n"
        "words.simulated(open_store(sys.argv[1])).feed(words=[('a',), ('b',)])\n"
    )
    tests = str(Path(__file__).parent.parent)
    subprocess.run([sys.executable, "-c", code, str(store)], check=True, env={**os.environ, "PYTHONPATH": tests})
    later = time.time_ns() + 20 * 10**9
    monkeypatch.setattr(connect_module, "time", SimpleNamespace(time_ns=lambda: later))
    return cast(Simulated, SimpleNamespace(store=open_store(str(store))))


def test_a_command_without_a_driver_says_so_at_once_and_does_not_wait(left: Simulated) -> None:
    sent = run("rescale", left, "4", code=4)
    assert "Sent as command 0.\nNo driver is running: process " in sent.stdout
    assert "has ended; its last commit was epoch 0, and it last wrote 20" in sent.stdout
    assert "The command is carried out when one runs; --wait waits for that." in sent.stdout
    answer = told(run("rescale", left, "3", "--json", code=4))
    assert (answer["command"], answer["driver_gone"][:20]) == (1, "no driver is running")
    run("rescale", left, "5", "--no-wait")
    assert "command 3 has not been heard yet" in run("cancel", left, "2", "--wait", "--timeout", "0", code=4).stderr


def test_a_command_that_cannot_be_meant_is_refused_without_a_driver_too(left: Simulated) -> None:
    before = files(left.store)
    assert "there is no command 99; none was ever sent" in run("cancel", left, "99", code=1).stderr
    assert files(left.store) == before
    run("rescale", left, "4", code=4)
    assert "there is no command 99; the last one is 0" in run("cancel", left, "99", "--dry-run", code=1).stderr
    assert "Would end: command 0 (rescale), not heard yet" in run("cancel", left, "0", "--dry-run").stdout


def test_unheard_commands_are_listed_by_number_and_verb(left: Simulated) -> None:
    for verb in (["rescale", "4"], ["merge", "0", "1"], ["cancel", "0"]):
        run(verb[0], left, *verb[1:], code=4)
    text = run("status", left).stdout
    assert "unheard    command 0 (rescale) in the control log" in text
    assert "unheard    command 2 (cancel) in the control log" in text
    assert "driver     no driver is running: process " in text
    assert "Command 1 (merge): not heard yet" in run("commands", left).stdout
    assert told(run("commands", left, "--json"))["unheard"] == {"0": "rescale", "1": "merge", "2": "cancel"}
    watched = run("watch", left, "--once").stdout
    assert "command 1 (merge)" in watched


@pytest.mark.parametrize(
    ("owner", "beat_s", "planned", "silent_s", "gone"),
    [
        ("here:1", 1.0, False, 2, ""),
        ("here:gone", 1.0, False, 2, ""),
        ("here:gone", 1.0, False, 5, "no driver is running: process"),
        ("here:gone", 60.0, False, 100, ""),
        ("here:1", 1.0, False, 10, ""),
        ("here:1", 1.0, False, 60, "no driver seems to be running: its last commit was epoch 7"),
        ("there:1", 60.0, False, 150, ""),
        ("there:1", 60.0, False, 300, "no driver seems to be running"),
        ("there:1", 1.0, True, 60, ""),
        ("here:self", 1.0, True, 9000, ""),
        ("there:1", 1.0, True, 900, "it last wrote 15 minutes ago"),
    ],
)
def test_what_the_store_tells_of_the_driver(owner: str, beat_s: float, planned: bool, silent_s: int, gone: str) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owner = (
        owner.replace("here", socket.gethostname()).replace("gone", str(ended.pid)).replace("self", str(os.getpid()))
    )
    plan = Plan(Epoch(8), Attempt(0), "q", "o", 0, {}) if planned else None
    history = History(epoch=Epoch(7), owner=owner, beat_s=beat_s, plan=plan)
    pulse = Pulse()
    pulse.written_ms = 1_000_000
    found = driver_gone(history, pulse, 1_000_000 + 1000 * silent_s)
    assert gone in found
    assert bool(gone) == bool(found)


def test_a_driver_that_dies_while_a_command_is_waited_for_is_told(
    sim: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = iter(["", "", "no driver is running: it has ended"])
    monkeypatch.setattr(Control, "_gone", lambda self, history: next(answers))
    sent = run("rescale", sim, "4", code=4)
    assert (
        "Sent as command 0.\nNo driver is running: it has ended. The command is carried out when one runs"
        in sent.stdout
    )
