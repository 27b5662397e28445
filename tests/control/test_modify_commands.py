"""Changing the graph on the command line: code that travels, what is refused, what is rolled back, and what is told."""

from __future__ import annotations

import io
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import millstream as ms
from millstream.control import modify_commands
from millstream.control.cli import main
from millstream.control.connect import Control
from millstream.control.handle import Handle
from millstream.control.modify import Asking
from millstream.engine.bundles import bundle
from millstream.store.objects import open_store
from millstream.testing import Simulated
from words import WORDS, Count, files, running, simulated

COUNTED = {"the": 4, "mill": 2, "and": 2, "stream": 1, "wheel": 1, "of": 1}
"""How often each word comes in an epoch."""

RULES = """
import millstream as ms
import pyarrow as pa
import pyarrow.compute as pc


class Tens(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row, at):
        self.total.set(self.total.get() + 10)
        yield at.key, self.total.get()


class Halves(ms.Computation):
    total = ms.Value("double", default=0.0)
    seen = ms.Value("boolean", default=False)
    output = "word string, total long"

    def on_record(self, row, at):
        self.total.set(self.total.get() + 0.5)
        self.seen.set(True)
        yield at.key, 0


class Most(ms.Computation):
    most = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row, at):
        self.most.set(max(self.most.get(), row.total))
        yield at.key, self.most.get()


class Fails(Tens):
    def on_record(self, row, at):
        if at.key == "wheel":
            raise ValueError("no wheels")
        yield from super().on_record(row, at)


class Unmade(Tens):
    def __init__(self):
        raise RuntimeError("not today")


def is_short(batch):
    return pc.less(pc.utf8_length(batch["word"]), 4)


def is_the(batch):
    return pc.equal(batch["word"], "the")


def louder(batch):
    return pa.record_batch([pc.utf8_upper(batch["word"])], ["word"])


def thousandfold(total):
    return int(total * 1000)
"""


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MILLSTREAM_TOKEN", raising=False)


@pytest.fixture
def sim(tmp_path: Path) -> Simulated:
    made = simulated(open_store(str(tmp_path / "store")))
    made.feed(words=WORDS)
    return made


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """A file of code that nobody has imported."""
    (tmp_path / "rules.py").write_text(RULES)
    return str(tmp_path / "rules.py")


def run(verb: str, sim: Simulated, *args: str, code: int = 0) -> Result:
    """A verb on a store; the test fails if it ends with another code."""
    result = CliRunner().invoke(main, [verb, sim.store.uri, *args])
    assert result.exit_code == code, result.output
    assert isinstance(result.exception, SystemExit | None)
    return result


def carried_out(verb: str, sim: Simulated, *args: str, code: int = 0) -> Result:
    """A verb that waits, while epochs go on."""
    with running(sim):
        return run(verb, sim, *args, "--timeout", "60", code=code)


def told(result: Result) -> Any:
    """The one JSON object on standard output."""
    assert result.stdout.count("\n") == 1
    return json.loads(result.stdout)


def steps(sim: Simulated) -> list[str]:
    return [step.name for step in sim.graph.steps]


def totals(sim: Simulated, step: str = "count", state: str | None = None) -> dict[str, Any]:
    return dict(sim.state(step, state))


def began(sim: Simulated, number: int) -> int:
    outcome = sim.outcome(number)
    assert outcome is not None
    assert outcome.state == "committed", outcome
    return outcome.began


@pytest.mark.parametrize("command", modify_commands.COMMANDS, ids=lambda command: str(command.name))
def test_every_verb_says_what_it_does(command: Any) -> None:
    result = CliRunner().invoke(main, [command.name, "-h"])
    assert result.exit_code == 0
    assert f"{command.name} [OPTIONS] STORE" in result.stdout
    assert command.name in main.commands
    assert all(option.help for option in command.params if option.param_type_name == "option")


# -- what changes


def test_a_step_is_replaced_by_code_from_a_file_and_keeps_its_state(sim: Simulated, rules: str) -> None:
    text = carried_out("modify", sim, "--replace", f"count={rules}:Tens", "--carry", "total").stdout
    first = began(sim, 0)
    assert text.splitlines() == ["Sent as command 0.", f"Command 0 (modify): committed in epoch {first}"]
    epochs = sim.epoch + 1
    assert totals(sim) == {word: n * (first + 10 * (epochs - first)) for word, n in COUNTED.items()}
    Path(rules).unlink()
    sim.restart()  # the query as it was written: the code that it has since is in the store
    sim.feed(words=[("the",)])
    assert totals(sim)["the"] == 4 * (first + 10 * (epochs - first)) + 10


def test_a_module_of_the_current_folder_is_sent_with_what_it_imports(
    sim: Simulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "amounts.py").write_text("AMOUNT = 7\n")
    (tmp_path / "sevens.py").write_text(
        "import millstream as ms\nfrom amounts import AMOUNT\n\n\nclass Sevens(ms.Computation):\n"
        "    total = ms.Value('long', default=0)\n    output = 'word string, total long'\n\n"
        "    def on_record(self, row, at):\n        self.total.set(self.total.get() + AMOUNT)\n"
        "        yield at.key, self.total.get()\n"
    )
    monkeypatch.chdir(tmp_path)
    run("modify", sim, "--replace", "count=sevens:Sevens", "--carry-all", "--no-wait")
    sim.feed(words=[("the",), ("new",)])
    assert (totals(sim)["the"], totals(sim)["new"]) == (11, 7)


def test_carry_all_is_for_all_state_that_has_no_rule_of_its_own(sim: Simulated, rules: str) -> None:
    run("modify", sim, "--replace", f"count={rules}:Halves", "--carry", "total:double", "--carry-all", "--no-wait")
    sim.feed(words=[("the",)])
    assert totals(sim)["the"] == 4.5
    assert dict(sim.state("count", "seen")) == {"the": True}, "what is new begins empty"
    run("modify", sim, "--replace", f"count={rules}:Halves", "--fresh", "total", "--carry-all", "--no-wait")
    sim.feed(words=[("new",)])
    assert totals(sim) == {"new": 0.5}
    assert dict(sim.state("count", "seen")) == {"the": True, "new": True}, "and what was there is kept"


def test_a_wheel_is_sent_without_being_installed(sim: Simulated, tmp_path: Path) -> None:
    wheel = tmp_path / "shop-2.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("shop/__init__.py", "")
        archive.writestr("shop/rules.py", RULES)
        archive.writestr("shop-2.0.dist-info/METADATA", "Name: shop\nVersion: 2.0\n")
    run("modify", sim, "--replace", f"count={wheel}:shop.rules:Tens", "--carry", "total", "--no-wait")
    sim.feed(words=[("the",)])
    assert totals(sim)["the"] == 14


def test_state_is_cast_converted_dropped_and_begun_anew(sim: Simulated, rules: str) -> None:
    run("modify", sim, "--replace", f"count={rules}:Halves", "--carry", "total:double", "--fresh", "seen", "--no-wait")
    sim.feed(words=[("the",)])
    assert (totals(sim, state="total")["the"], totals(sim, state="seen")) == (4.5, {"the": True})
    run(
        "modify", sim, "--replace", f"count={rules}:Tens", "--convert", f"count.total={rules}:thousandfold",
        "--drop", "seen", "--no-wait",
    )  # fmt: skip
    sim.feed(words=[("the",)])
    assert (totals(sim)["the"], totals(sim)["mill"]) == (4510, 2000)
    assert "cannot be undone: state was converted" in run("revert", sim, "1", code=1).stderr


def test_a_restart_with_the_query_as_it_is_now_finds_the_code_that_converts_state(sim: Simulated, rules: str) -> None:
    run("modify", sim, "--replace", f"count={rules}:Tens", "--convert", f"total={rules}:thousandfold", "--no-wait")
    sim.feed(words=[("the",)])
    sim.restart(sim.driver.modifier.version.query)
    sim.feed(words=[("the",)])
    assert (totals(sim)["the"], totals(sim)["mill"]) == (4020, 2000)
    assert sim.driver.modifier.version.bundles == (bundle(f"{rules}:Tens").sha,)


def test_a_filter_is_inserted_its_function_replaced_and_it_is_removed(sim: Simulated, rules: str) -> None:
    def counts_of(*words: str) -> dict[str, int]:
        before = totals(sim)
        sim.feed(words=[(word,) for word in words])
        return {word: n - before.get(word, 0) for word, n in totals(sim).items() if n != before.get(word, 0)}

    insert = ("--filter", f"some={rules}:is_short", "--after", "words", "--before", "count")
    run("modify", sim, *insert, "--no-wait")
    assert counts_of("the", "of", "stream") == {"the": 1, "of": 1}
    run("modify", sim, "--replace", f"some={rules}:is_the", "--no-wait")
    assert counts_of("the", "of", "stream") == {"the": 1}
    run("modify", sim, "--remove", "some", "--reconnect", "--no-wait")
    assert counts_of("the", "of", "stream") == {"the": 1, "of": 1, "stream": 1}
    run("modify", sim, "--map", f"loud={rules}:louder", "--output", "word string", *insert[2:], "--no-wait")
    assert counts_of("the") == {"THE": 1}


def test_a_step_is_inserted_between_two_or_as_a_branch(sim: Simulated, rules: str) -> None:
    run("modify", sim, "--insert", f"most={rules}:Most", "--after", "count", "--key", "word", "--no-wait")
    sim.feed(words=[("the",)])
    assert totals(sim, "most") == {"the": 5}
    insert = ("--insert", f"first={rules}:Tens", "--after", "words", "--before", "count")
    answer = told(run("modify", sim, *insert, "--no-wait", "--json"))
    assert answer == {"change": "insert first", "dry_run": False, "command": 1, "outcome": None}
    sim.feed(words=[("the",)])
    assert steps(sim) == ["first", "count", "most"]
    assert totals(sim, "first") == {"the": 10}


def test_several_steps_are_replaced_removed_and_renamed_in_one_epoch(sim: Simulated, rules: str) -> None:
    for name in ("most", "again"):
        run("modify", sim, "--insert", f"{name}={rules}:Most", "--after", "count", "--key", "word", "--no-wait")
        sim.feed(words=WORDS)
    both = ("--replace", f"count={rules}:Tens", "--replace", f"most={rules}:Halves")
    ruled = ("--carry", "count.total", "--fresh", "most.total", "--fresh", "most.seen", "--drop", "most.most")
    answer = told(
        carried_out("modify", sim, *both, *ruled, "--remove", "again", "--rename", "count=tally", "--json")
    )  # fmt: skip
    assert answer["change"] == "replace count; replace most; remove again; rename count to tally"
    assert answer["outcome"]["state"] == "committed"
    assert steps(sim) == ["tally", "most"]
    first = began(sim, answer["command"])
    assert totals(sim, "tally")["the"] == 4 * (first + 10 * (sim.epoch + 1 - first))
    assert totals(sim, "most", "total")["the"] == 4 * 0.5 * (sim.epoch + 1 - first)


def test_a_change_may_wait_for_an_epoch(sim: Simulated) -> None:
    run("modify", sim, "--rename", "count=tally", "--at", "3", "--no-wait")
    for _ in range(2):
        sim.feed(words=WORDS)
        assert steps(sim) == ["count"]
    sim.feed(words=WORDS)
    assert steps(sim) == ["tally"]
    assert "epoch 2 is past" in run("modify", sim, "--rename", "tally=count", "--at", "2", code=1).stderr


def test_a_change_of_python_brings_code_by_value_and_from_files(sim: Simulated, rules: str) -> None:
    class Hundreds(Count):
        def on_record(self, row: Any, at: ms.At) -> Any:
            self.total.set(self.total.get() + 100)
            yield at.key, self.total.get()

    control = Control(sim.store)
    with control.modify(wait=False) as change:
        change.insert("some", keep=change.code(f"{rules}:is_the"), after="words", before="count")
        change.replace("count", Hundreds, state={"total": ms.convert(lambda total: -total)})
    sim.feed(words=WORDS)
    assert began(sim, change.handle.number) == 1
    assert totals(sim) == {**{word: -n for word, n in COUNTED.items()}, "the": 396}


# -- a dry run


def test_a_dry_run_says_what_would_be_and_changes_nothing(sim: Simulated, rules: str) -> None:
    halves = ("--replace", f"count={rules}:Halves", "--carry", "total:double", "--fresh", "seen", "--dry-run")
    lines = carried_out("modify", sim, *halves).stdout.splitlines()
    assert lines == [
        "Sent as command 0.",
        "would replace count",
        "count.total is converted, as it is read and in the background",
        "count.seen begins empty",
        "Nothing was changed.",
    ]
    answer = told(
        carried_out("modify", sim, "--replace", f"count={rules}:Tens", "--carry", "total", "--dry-run", "--json")
    )
    assert (answer["dry_run"], answer["outcome"]["state"]) == (True, "done")
    assert answer["outcome"]["text"] == "would replace count\ncount.total is kept as it is"
    assert sim.driver.journal.history.version == 0
    assert totals(sim)["the"] == 4 * (sim.epoch + 1)
    refused = carried_out("modify", sim, "--replace", f"count={rules}:Most", "--dry-run", code=1)
    assert "nothing is said of most, total." in refused.stderr


# -- what is refused


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--replace", "count=RULES:Halves"], "nothing is said of total, seen. Say of each what becomes of it"),
        (
            ["--replace", "count=RULES:Most", "--carry", "total", "--fresh", "most"],
            "the new computation has most; say drop()",
        ),
        (["--replace", "count=RULES:Tens", "--carry", "totale"], "a rule for 'totale', but what is stored is total"),
        (["--replace", "count=RULES:Halves", "--carry", "total", "--fresh", "seen"], "say carry('DOUBLE'), or convert"),
        (["--replace", "count=RULES:is_the", "--carry", "total"], "expected a Computation class or instance"),
        (["--replace", "count=RULES:Unmade", "--carry", "total"], "RuntimeError: not today"),
        (["--replace", "cuont=RULES:Tens"], "no step or map of that name; its steps are count, its maps are none"),
        (["--filter", "some=RULES:Tens", "--after", "words"], "found the computation Tens, expected a function"),
        (["--filter", "some=RULES:is_the", "--after", "lines"], "no stream 'lines'; the query has words, count"),
        (["--filter", "count=RULES:is_the", "--after", "words"], "'count'"),
        (["--insert", "top=RULES:Most", "--after", "count"], "say by which columns its records are keyed"),
        (["--map", "loud=RULES:louder", "--after", "words", "--output", "word strong"], "strong"),
        (["--remove", "count"], "it is read by out; say reconnect=True"),
        (["--remove", "words"], "it is read by count"),
        (["--rename", "count=words"], "'words'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_the_driver_finds_wrong_is_aborted_and_the_query_goes_on(
    sim: Simulated, rules: str, arguments: list[str], reason: str
) -> None:
    given = [each.replace("RULES", rules) for each in arguments]
    with running(sim):
        refused = run("modify", sim, *given, "--timeout", "60", code=1)
        error = told(run("modify", sim, *given, "--timeout", "60", "--json", code=1))
    assert "command 0 (modify) was aborted: " in refused.stderr
    assert reason in refused.stderr
    assert reason in error["error"]
    assert (error["kind"], error["exit_code"]) == ("UserError", 1)
    assert (steps(sim), sim.driver.journal.history.version) == (["count"], 0)
    assert totals(sim)["the"] == 4 * (sim.epoch + 1)


@pytest.mark.parametrize(
    ("top", "reason"),
    [
        (
            "import no_such_module_at_all",
            "ModuleNotFoundError: No module named 'no_such_module_at_all' (bad.py, line 1)",
        ),
        ("raise OSError('disk on fire')", "OSError: disk on fire (bad.py, line 1)"),
    ],
    ids=["cannot be imported", "raises at import"],
)
def test_code_that_cannot_be_imported_is_aborted_with_its_reason(
    sim: Simulated, tmp_path: Path, top: str, reason: str
) -> None:
    (tmp_path / "bad.py").write_text(f"{top}\n{RULES}")
    refused = carried_out("modify", sim, "--replace", f"count={tmp_path}/bad.py:Tens", "--carry", "total", code=1)
    assert "cannot be imported here" in refused.stderr
    assert reason in refused.stderr
    assert totals(sim)["the"] == 4 * (sim.epoch + 1)


def test_what_fails_in_its_first_epoch_is_rolled_back(sim: Simulated, rules: str) -> None:
    fails = ("--replace", f"count={rules}:Fails", "--carry", "total")
    tried = carried_out("modify", sim, *fails, code=1)
    assert "command 0 (modify) was aborted: 'count' fails on a sample of recent input" in tried.stderr
    assert "no wheels" in tried.stderr
    refused = carried_out("modify", sim, *fails, "--rename", "count=tally", "--no-rehearsal", code=1)
    assert "command 1 (modify) was rolled back: " in refused.stderr
    assert "step 'tally' failed in epoch " in refused.stderr
    assert "ValueError: no wheels (key 'wheel', record Row(word='wheel'))" in refused.stderr
    line = RULES.splitlines().index('            raise ValueError("no wheels")') + 1
    assert f'rules.py", line {line}, in on_record' in refused.stderr
    assert "start the query again" not in refused.stderr, "it runs"
    assert steps(sim) == ["count"]
    assert totals(sim) == {word: n * (sim.epoch + 1) for word, n in COUNTED.items()}


def test_who_comes_second_has_a_conflict(sim: Simulated, rules: str, monkeypatch: pytest.MonkeyPatch) -> None:
    send = Asking.send

    def sent_late(self: Asking, *, trial: bool = False) -> Handle:
        change = sim.modify()
        change.insert("other", keep=lambda batch: [True] * len(batch), after="words")
        sim.send(change)
        return send(self, trial=trial)

    monkeypatch.setattr(Asking, "send", sent_late)
    tens = ("--replace", f"count={rules}:Tens", "--carry", "total")
    stale = carried_out("modify", sim, *tens, code=3)
    assert "command 1 (modify) was refused: " in stale.stderr
    assert totals(sim)["the"] == 4 * (sim.epoch + 1)
    monkeypatch.setattr(Asking, "send", send)
    carried_out("modify", sim, *tens)
    assert began(sim, 2) > began(sim, 0)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ([], "say what to change: --replace, --insert"),
        (["--replace", "count"], "give STEP=TARGET"),
        (["--replace", "count="], "give STEP=TARGET"),
        (["--rename", "count"], "give OLD=NEW"),
        (["--convert", "total"], "give STATE=TARGET"),
        (["--remove", "a", "--reconnect", "--cut"], "exclude each other"),
        (["--rename", "a=b", "--cut"], "go with --remove"),
        (["--rename", "a=b", "--carry", "total"], "rules are for steps that are replaced"),
        (["--rename", "a=b", "--carry-all"], "--carry-all is for steps that are replaced"),
        (["--rename", "a=b", "--after", "words"], "--before and --output go with --insert"),
        (["--replace", "a=RULES:Tens", "--replace", "a=RULES:Most"], "it is replaced twice"),
        (["--replace", "a=RULES:Tens", "--replace", "b=RULES:Tens", "--carry", "x"], "say of which step, as a.x, b.x"),
        (["--replace", "a=RULES:Tens", "--carry", "b.total"], "'b' is not replaced; what is: a"),
        (["--replace", "a=RULES:Tens", "--carry", "total", "--drop", "a.total"], "there is another rule for it"),
        (["--replace", "a=RULES:Tens", "--carry", "total:lung"], "--carry total:lung: "),
        (["--filter", "a=RULES:is_the"], "say which stream 'a' reads: --after STREAM"),
        (["--filter", "a=RULES:is_the", "--after", "words", "--key", "word"], "--key goes with --insert"),
        (["--map", "a=RULES:louder", "--after", "words"], "--map and --output go together"),
        (["--filter", "a=RULES:is_the", "--after", "words", "--output", "a long"], "--map and --output go together"),
        (
            ["--filter", "a=RULES:is_the", "--insert", "b=RULES:Tens", "--after", "words"],
            "b, a: one command inserts one thing; send several commands, or",
        ),
        (["--rename", "a=b", "--dry-run", "--no-wait"], "leave out --no-wait"),
        (["--rename", "a=b", "--at", "soon"], "'soon' is neither an epoch"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_wrong_usage_sends_nothing(sim: Simulated, rules: str, arguments: list[str], reason: str) -> None:
    before = files(sim.store)
    given = [each.replace("RULES", rules) for each in arguments]
    assert reason in " ".join(run("modify", sim, *given, code=2).stderr.split())
    assert files(sim.store) == before


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("rules", "expected module:Name, path/to/file.py:Name or path/to/dist.whl:package.module:Name"),
        ("no_such_module:Tens", "there is no module 'no_such_module' here"),
        ("FOLDER/none.py:Tens", "there is no Python file"),
        ("FOLDER/rules.py:Tans", "the module 'rules' has no 'Tans'; it has Tens"),
        ("FOLDER/broken.py:Tens", "broken.py, line 1: "),
        ("FOLDER/none.whl:rules:Tens", "cannot read the wheel"),
    ],
)
def test_code_that_cannot_be_found_or_read_here_is_not_sent(
    sim: Simulated, rules: str, tmp_path: Path, target: str, reason: str
) -> None:
    (tmp_path / "broken.py").write_text("class Tens(\n")
    before = files(sim.store)
    given = ("--replace", f"count={target.replace('FOLDER', str(tmp_path))}", "--carry", "total")
    assert reason in run("modify", sim, *given, code=1).stderr
    assert reason in told(run("modify", sim, *given, "--json", code=1))["error"]
    assert files(sim.store) == before


def test_without_a_driver_a_change_waits_and_says_so(sim: Simulated) -> None:
    late = run("modify", sim, "--rename", "count=tally", "--timeout", "0", code=4)
    assert "command 0 has not been heard yet, after 0 s" in late.stderr
    error = told(run("modify", sim, "--rename", "count=other", "--timeout", "0", "--json", code=4))
    assert (error["kind"], error["exit_code"]) == ("TimeoutError", 4)
    sim.feed(words=WORDS)
    assert steps(sim) == ["tally"]


def test_a_guarded_store_takes_code_only_with_its_token(tmp_path: Path, rules: str) -> None:
    sim = simulated(open_store(str(tmp_path / "store")), token="secret")
    sim.feed(words=WORDS)
    before = files(sim.store)
    tens = ("--replace", f"count={rules}:Tens", "--carry", "total")
    for verb, arguments in (("modify", tens), ("modify", (*tens, "--dry-run"))):
        assert "is guarded: give the token" in run(verb, sim, *arguments, code=1).stderr
        assert "is not the token" in run(verb, sim, *arguments, "--token", "guess", code=1).stderr
    assert files(sim.store) == before, "not even the code"
    run("modify", sim, *tens, "--token", "secret", "--no-wait")
    sim.feed(words=WORDS)
    assert totals(sim)["the"] == 44
    assert "is guarded: give the token" in run("revert", sim, "0", code=1).stderr
    assert "replace count" in run("history", sim).stdout, "looking needs none"
    run("revert", sim, "0", "--token", "secret", "--no-wait")
    sim.feed(words=WORDS)
    assert totals(sim)["the"] == 48


# -- what was done


def test_a_modification_is_undone_by_its_number(sim: Simulated, rules: str) -> None:
    run("modify", sim, "--replace", f"count={rules}:Tens", "--carry", "total", "--no-wait")
    sim.feed(words=WORDS)
    trial = told(carried_out("revert", sim, "0", "--dry-run", "--json"))
    assert (trial["reverts"], trial["dry_run"], trial["command"]) == (0, True, 1)
    assert trial["outcome"]["text"].startswith("would revert 0: replace count\n")
    before, epoch = totals(sim)["the"], sim.epoch
    assert before == 4 + 40 * epoch
    text = carried_out("revert", sim, "0").stdout
    assert f"Command 2 (revert): committed in epoch {began(sim, 2)}" in text
    assert totals(sim)["the"] == before + 40 * (began(sim, 2) - epoch - 1) + 4 * (sim.epoch + 1 - began(sim, 2))
    refused = run("revert", sim, "7", code=1)
    assert "command 7 is no modification that was committed; those are 0, 2" in refused.stderr
    assert "--no-wait" in run("revert", sim, "0", "--dry-run", "--no-wait", code=2).stderr


def test_the_history_is_a_line_for_each_command(sim: Simulated, rules: str) -> None:
    assert run("history", sim).stdout == "Nothing has been done to the query.\n"
    assert told(run("history", sim, "--json")) == {"history": []}
    run("rescale", sim, "4", "--no-wait")
    sim.feed(words=WORDS)
    run("modify", sim, "--replace", f"count={rules}:Tens", "--carry", "total", "--no-wait")
    sim.feed(words=WORDS)
    carried_out("modify", sim, "--replace", f"count={rules}:Fails", code=1)
    run("modify", sim, "--rename", "count=tally", "--at", "100000", "--no-wait")
    sim.feed(words=WORDS)
    titles, *lines = run("history", sim).stdout.splitlines()
    assert titles.split() == ["no", "asked", "(UTC)", "by", "what", "epochs", "took", "stall", "outcome"]
    places = {title: titles.index(title) for title in titles.split()}
    assert [line.split()[0] for line in lines] == ["0", "1", "2", "3"]
    shown = [
        [line[places[one] : places[two]].strip() for one, two in (("what", "epochs"), ("epochs", "took"))]
        for line in lines
    ]
    assert shown[0][0].startswith("rescale: 32 bins, Paced(1.1)")
    assert shown[1:] == [
        ["modify: replace count", "2"],
        ["modify: replace count", ""],
        ["modify: rename count to tally", ""],
    ]
    ends = [line[places["outcome"] :] for line in lines]
    assert (ends[0], ends[1], ends[3]) == ("done", "committed", "prepared")
    assert ends[2].startswith("aborted: step 'count': nothing is said of total.")
    listed = told(run("history", sim, "--json"))["history"]
    assert [(each["verb"], each["state"], each["first"]) for each in listed] == [
        ("rescale", "done", 1), ("modify", "committed", 2), ("modify", "aborted", -1), ("modify", "prepared", -1),
    ]  # fmt: skip
    assert all(each["at"] and each["sender"] for each in listed)


@pytest.mark.parametrize("width", [80, 200])
def test_in_a_terminal_the_history_is_a_table(
    sim: Simulated, rules: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    carried_out("modify", sim, "--replace", f"count={rules}:Fails", "--carry", "total", "--no-rehearsal", code=1)
    console = Console(width=width, force_terminal=True, record=True, file=io.StringIO())
    monkeypatch.setattr("rich.console.Console", lambda: console)
    modify_commands._print_table(Control(sim.store).history())
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= width
    assert "no wheels" in text.replace("\n", " ")
    assert "rolled back" in text
    if width == 200:
        assert "modify: replace count" in text
        assert "0 rolled back: step 'count' failed in epoch " in text


def test_a_shadow_is_built_and_cut_over_and_a_sink_is_added(sim: Simulated, rules: str, tmp_path: Path) -> None:
    result = carried_out("modify", sim, "--shadow", f"count={rules}:Tens", "--parquet", f"more={tmp_path / 'out'}",
                         "--after", "count")  # fmt: skip
    assert "committed in epoch" in result.output
    assert [step.name for step in sim.graph.steps] == ["count", "count_shadow"]
    assert [sink.name for sink in sim.graph.sinks] == ["out", "more"]
    before = sim.driver.journal.history.epoch
    carried_out("modify", sim, "--cut-over", "count")
    assert [step.name for step in sim.graph.steps] == ["count"]
    assert dict(sim.state("count"))["the"] % 40 == 0, "what the shadow has gathered since its first epoch"
    assert dict(sim.state("count"))["the"] >= 40
    assert sim.driver.journal.history.epoch > before
    texts = [past.text for past in Control(sim.store).history()]
    assert texts == ["shadow count; insert sink more", "cut over count"]


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (("--parquet", "more=/tmp/x"), "say which stream it is for"),
        (("--cut-over", "count"), "no step 'count_shadow'"),
        (("--shadow", "nothing=RULES:Tens"), "no step of that name"),
        (("--shadow", "count=RULES:Tens", "--key", "nothing"), "nothing"),
        (("--shadow", "count", "--key", "nothing"), "nothing"),
        (("--shadow", "count", "--lateness", "more=1 second"), "'more' is no new --source"),
    ],
)
def test_bad_shadows_and_sinks_are_refused(sim: Simulated, rules: str, args: tuple[str, ...], reason: str) -> None:
    given = [each.replace("RULES", rules) for each in args]
    with running(sim):
        result = CliRunner().invoke(main, ["modify", sim.store.uri, *given, "--timeout", "60"])
    assert result.exit_code in (1, 2), result.output
    assert reason in result.output
    assert sim.driver.journal.history.version == 0
