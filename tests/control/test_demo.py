"""The demo: its verdict can be trusted, its display fits, and it leaves nothing behind."""

from __future__ import annotations

import io
import math
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from rich.cells import cell_len
from rich.console import Console

from millstream.control import demo, demo_driver, demo_words
from millstream.control.cli import find_java
from millstream.control.demo_picture import write_picture
from millstream.control.demo_timeline import WARM_UP, EpochSeen, Migration, Timeline, chart
from millstream.control.demo_verdict import Kill, Rescaled, Result
from millstream.control.display import Display, Finding, LiveDisplay, Moving, PlainDisplay, Progress, open_display
from millstream.errors import UserError
from millstream.protocol.steering import Outcome
from millstream.store.journal import Journal
from millstream.store.objects import open_store

# A test runner that was started in the background ignores SIGINT, and so would everything it starts.
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler);"
    "from millstream.control.cli import main; main()"
)
MARK = "MILLSTREAM_TEST_MARK"


# -- input and verdict


def test_the_text_is_the_same_every_time_and_has_as_many_words_as_asked_for(tmp_path: Path) -> None:
    demo_words.write_text(tmp_path / "a", epochs=5, words=1003)
    demo_words.write_text(tmp_path / "b", epochs=5, words=1003)
    files = sorted(path.name for path in (tmp_path / "a").iterdir())
    assert len(files) == 5 * demo_words.FILES_PER_EPOCH
    assert all((tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes() for name in files)
    counts = demo_words.count_words(tmp_path / "a")
    assert counts.total() == 1003
    assert counts.most_common(1)[0][0] == "the"


def test_no_word_is_made_twice() -> None:
    words = demo_words.vocabulary()
    assert len(set(words)) == len(words) == demo_words.DISTINCT_WORDS


EXPECTED = Counter({"mill": 3, "stream": 1})
STATE = [("mill", 3), ("stream", 1)]
SINK = [("mill", 1), ("stream", 1), ("mill", 2), ("mill", 3)]


def table(rows: list[tuple[str, int]]) -> pa.Table:
    return pa.table(
        {
            "word": pa.array([word for word, _ in rows], pa.string()),
            "total": pa.array([total for _, total in rows], pa.int64()),
        }
    )


def test_a_right_result_is_found_exact() -> None:
    assert demo_words.compare(EXPECTED, table(STATE), table(SINK)).exact


@pytest.mark.parametrize(
    "state",
    [
        [("mill", 3)],
        [("mill", 4), ("stream", 1)],
        [*STATE, ("mill", 3)],
        [*STATE, ("wheel", 1)],
    ],
    ids=["lost", "counted twice", "a key twice", "never there"],
)
def test_a_wrong_state_is_found(state: list[tuple[str, int]]) -> None:
    found = demo_words.compare(EXPECTED, table(state), table(SINK))
    assert not found.exact
    assert found.state_wrong
    assert not found.sink_wrong


@pytest.mark.parametrize(
    "sink",
    [
        SINK[:-1],
        SINK[1:],
        [*SINK, ("mill", 3)],
        [*SINK, ("mill", 4)],
        [*SINK, ("wheel", 1)],
        [("mill", 1), ("stream", 1), ("mill", 1), ("mill", 3)],
    ],
    ids=["the last lost", "the first lost", "delivered twice", "counted twice", "never there", "one for another"],
)
def test_a_wrong_sink_is_found(sink: list[tuple[str, int]]) -> None:
    found = demo_words.compare(EXPECTED, table(STATE), table(sink))
    assert not found.exact
    assert found.sink_wrong
    assert not found.state_wrong


MOVED = Outcome(0, "rescale", "done", rounds=4, done=4, began=3, last=6, bytes=4000)
CUT = Outcome(1, "rescale", "done", rounds=4, done=4, began=10, last=13, bytes=4000)
LIVE_RESCALE = Rescaled((2, 4), (2, 4), 3, 100, MOVED, 2)
CUT_RESCALE = Rescaled((4, 3), (4, 3), 10, 100, CUT, 2)
KILL = Kill(12, 12, -signal.SIGKILL, 5, 1.0, 2.0)


def timeline_of(epochs: int) -> Timeline:
    when = demo.Schedule(epochs)
    migrations = tuple(Migration(at, at + when.rounds - 1, "2 to 4 slots") for at in (when.grow, when.shrink))
    seen = tuple(EpochSeen(n, n / 2, 900.0 if n in (0, when.kill) else 300.0 + n % 7, 2) for n in range(epochs))
    return Timeline(seen, migrations, when.kill, when.kill / 2 - 0.1)


def result_with(**changed: object) -> Result:
    found = demo_words.compare(EXPECTED, table(STATE), table(SINK))
    return replace(Result(found, LIVE_RESCALE, CUT_RESCALE, KILL, timeline_of(16), 3.0), **changed)  # type: ignore[arg-type]


def test_a_run_in_which_everything_hit_its_moment_is_exact() -> None:
    assert result_with().exact


@pytest.mark.parametrize(
    "changed",
    [
        {"kill": replace(KILL, code=0)},
        {"kill": replace(KILL, first_after=13)},
        {"live": replace(LIVE_RESCALE, outcome=None)},
        {"live": replace(LIVE_RESCALE, outcome=replace(MOVED, state="refused", reason="no such slot"))},
        {"live": replace(LIVE_RESCALE, outcome=replace(MOVED, began=4))},
        {"live": replace(LIVE_RESCALE, found=(2, 2))},
        {"cut": replace(CUT_RESCALE, outcome=replace(CUT, state="running", done=2))},
        {"cut": replace(CUT_RESCALE, done_by_first=0)},
        {"cut": replace(CUT_RESCALE, done_by_first=4)},
    ],
    ids=[
        "no signal",
        "after the commit",
        "not heard",
        "refused",
        "an epoch late",
        "no slot more",
        "not ended",
        "killed before it",
        "killed after it",
    ],
)
def test_what_missed_its_moment_is_not_passed_off_as_a_proof(changed: dict[str, object]) -> None:
    result = result_with(**changed)
    out = io.StringIO()
    result.tell(PlainDisplay(out, "title", 16))
    assert not result.exact
    assert "Verdict: WRONG. The counts are right, but" in out.getvalue()
    assert len(re.findall("^  WRONG ", out.getvalue(), re.MULTILINE)) == 1


@pytest.mark.parametrize("epochs", [8, 9, 11, 40, 41, 999, 1000])
def test_the_kill_hits_the_middle_of_the_second_rescale_whatever_the_number_of_epochs(epochs: int) -> None:
    when = demo.Schedule(epochs)
    assert 0 < when.grow < when.grow + when.rounds <= when.shrink
    assert when.shrink + when.rounds <= epochs - 1
    for bins in (1024, 2048):
        rounds = math.ceil(bins / math.ceil(bins / when.rounds))  # as Batched cuts them
        assert when.shrink < when.kill < when.shrink + rounds


# -- timeline


def test_the_times_of_a_fresh_jvm_are_left_out() -> None:
    timeline = timeline_of(40)
    assert timeline.longest_ms(0, 39) == 306.0
    assert timeline.longest_ms(0, WARM_UP - 1) is None
    assert timeline.longest_ms(timeline.killed_in, timeline.killed_in + WARM_UP) == 300.0 + (timeline.killed_in + 3) % 7


@pytest.mark.parametrize("epochs", [8, 40, 1000])
def test_the_chart_is_ascii_and_fits_and_shows_what_happened(epochs: int) -> None:
    lines = chart(timeline_of(epochs))
    assert all(re.fullmatch(r"[\x20-\x7e]*", line) and len(line) <= 80 for line in lines)
    columns = [line[10:].ljust(70) for line in lines[1:7]]
    [marks] = [line[10:] for line in lines[7:] if re.fullmatch("[ mx]+", line)]
    assert marks.count("x") == 1
    assert columns[0].count("+") == 2  # the first epochs of both drivers are longer than the scale
    assert columns[0].index("+", 1) == marks.index("x") + 1
    if epochs == 40:
        assert marks == " " * 10 + "m" * 10 + " " * 5 + "mmmmmxmmmmm"


def test_the_picture_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a.picture"
    assert write_picture(timeline_of(40), path) == f"The timeline is in {path}"
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_one_is_told_how_to_get_the_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'millstream[bench]'" in write_picture(timeline_of(40), tmp_path / "a.png")
    assert list(tmp_path.iterdir()) == []


def test_a_picture_that_cannot_be_written_is_told_of(tmp_path: Path) -> None:
    told = write_picture(timeline_of(40), tmp_path / "gone" / "a.png")
    assert "could not be written" in told
    assert "No such file or directory" in told


# -- display


def tell_a_story(display: Display) -> None:
    with display:
        display.happened("driver 1 starts, pid 4242")
        for epoch in range(200):
            if epoch == 100:
                display.killed()
                display.happened("SIGKILL: the driver, its JVM and 3 Python workers are gone", "bold red")
                display.driver("pid 4711: starting Python, Java and Spark", "yellow")
            moving = Moving(epoch - 50, 30, (epoch - 50) * 64, 1920) if 50 <= epoch <= 80 else None
            display.progress(Progress(epoch, epoch * 30_000, 51_234.5, 600.0 + epoch, 1_234_567, 8, 2, moving))
    display.chart(chart(timeline_of(40)))
    display.note("The timeline is in a folder with a name that is longer than many a terminal is wide")
    display.verdict(True, "All records were counted exactly once.", [Finding("state", "right " * 30, True)])


def test_plain_output_has_no_control_codes_and_not_a_line_for_every_epoch() -> None:
    out = io.StringIO()
    tell_a_story(open_display("A demo with a “title”", 200, out))
    assert re.fullmatch(r"[\n\x20-\x7e]*", out.getvalue())
    # The first and the last epoch: all others follow within a second, unless the machine is very slow.
    assert len(re.findall(r"^ *[\d.]+ s  epoch ", out.getvalue(), re.MULTILINE)) < 100
    assert "Verdict: EXACT." in out.getvalue()


@pytest.mark.parametrize("width", [30, 60, 80, 200])
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_the_live_picture_fits_the_terminal_and_its_character_set(width: int, encoding: str) -> None:
    data = io.BytesIO()
    out = io.TextIOWrapper(data, encoding=encoding, errors="strict")
    console = Console(file=out, force_terminal=True, width=width, height=24, color_system=None)
    tell_a_story(LiveDisplay(console, "A demo", 200))
    out.flush()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.getvalue().decode(encoding))
    assert "200 of 200" in text
    assert ("##" if encoding == "ascii" else "██") in text
    assert max(cell_len(part) for line in text.split("\n") for part in line.split("\r")) <= width


# -- processes


def living(mark: str) -> list[int]:
    """The processes that were started with this mark in their environment, directly or not."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{MARK}={mark}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return found


def marked(mark: str, place: Path) -> dict[str, str]:
    return {**os.environ, MARK: mark, "TMPDIR": str(place), "JAVA_HOME": find_java()}


def test_a_process_is_found_by_its_session_also_outside_its_group() -> None:
    code = (
        "import os, sys; os.setpgid(0, 0) if os.fork() == 0 else None; "
        "os.write(1, b'%d\\n' % os.getpid()); sys.stdin.read()"  # in one piece: there are two who write
    )
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        pids = {int(process.stdout.readline()) for _ in range(2)}
        assert {item.pid for item in demo_driver.processes_of(process.pid)} == pids
    assert process.pid in pids


def test_a_driver_whose_parent_has_vanished_ends_itself(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "millstream.control.demo_driver", "--child", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=marked("orphan", tmp_path),
    ) as process:
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait() == -signal.SIGKILL


def test_a_driver_that_fails_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spark").mkdir()
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "millstream.py").write_text("raise RuntimeError('this install is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(broken))
    driver = demo_driver.DriverProcess(tmp_path, 1, [], "")
    try:
        with pytest.raises(UserError, match="this install is broken"):
            list(driver.reports())
    finally:
        driver.kill()


@pytest.mark.spark
@pytest.mark.slow
def test_the_demo_rescales_and_kills_its_driver_and_finds_the_result_exact(tmp_path: Path) -> None:
    ended = subprocess.run(
        [
            *(sys.executable, "-c", COMMAND, "demo", "--epochs=8", "--words=30000", "--keep-store"),
            f"--picture={tmp_path / 'timeline.png'}",
        ],
        capture_output=True,
        text=True,
        env=marked("demo", tmp_path),
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stderr == ""
    assert "Verdict: EXACT. All 30,000 records were counted exactly once" in ended.stdout
    killed = re.search(r"SIGKILL: driver 1 \(pid (\d+)\), its JVM \(pid (\d+)\)", ended.stdout)
    assert killed, ended.stdout
    for finding in (
        r"live rescale +2 to 4 slots in epochs 2 to 3: 2,048 bins, about [\d.]+ kB, in 2 rounds\n",
        r"killed rescale +4 to 3 slots in epochs 5 to 6: .* driver 1 had done 1 of them, driver 2 did the rest\n",
        r"SIGKILL +\d+ processes, in epoch 6 before its commit; driver 2 ran epoch 6 again\n",
    ):
        assert re.search(rf"^  ok +{finding}", ended.stdout, re.MULTILINE), ended.stdout
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert living("demo") == []
    # What was kept says the same, by other means: two drivers claimed the store, the last epoch is committed, and the
    # table of the only step has changed with each of four rounds.
    [folder] = [path for path in tmp_path.iterdir() if path.is_dir()]
    history = Journal.open(open_store(str(folder / "store"))).history
    assert (history.generation, history.epoch) == (2, 7)
    assert [(set(table.slots), table.version) for table in history.tables.values()] == [({0, 1, 2}, 4)]
    assert not (folder / "spark").exists()


@pytest.mark.spark
@pytest.mark.slow
def test_ctrl_c_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", COMMAND, "demo", "--epochs=100"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=marked("ctrl-c", tmp_path),
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert any("epoch   0:" in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == "Stopped.\n"
        assert process.wait() == 130
    assert living("ctrl-c") == []
    assert list(tmp_path.iterdir()) == []
