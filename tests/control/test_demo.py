"""The demo: its verdict can be trusted, its display fits, and it leaves nothing behind."""

from __future__ import annotations

import io
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest
from rich.cells import cell_len
from rich.console import Console

from millstream.control import demo, demo_driver, demo_words
from millstream.control.cli import find_java
from millstream.control.display import Display, Finding, LiveDisplay, PlainDisplay, Progress, open_display
from millstream.errors import UserError
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


@pytest.mark.parametrize(
    ("kill_code", "first_after", "exact"), [(-signal.SIGKILL, 5, True), (0, 5, False), (-signal.SIGKILL, 6, False)]
)
def test_a_kill_that_missed_its_moment_is_not_passed_off_as_a_proof(
    kill_code: int, first_after: int, exact: bool
) -> None:
    found = demo_words.compare(EXPECTED, table(STATE), table(SINK))
    result = demo.Result(found, 10, 5, first_after, kill_code, 5, 1.0, 2.0, 3.0)
    out = io.StringIO()
    result.tell(PlainDisplay(out, "title", 10))
    assert result.exact is exact
    assert ("Verdict: EXACT" in out.getvalue()) is exact


# -- display


def tell_a_story(display: Display) -> None:
    with display:
        display.happened("driver 1 starts, pid 4242")
        for epoch in range(200):
            if epoch == 100:
                display.killed()
                display.happened("SIGKILL: the driver, its JVM and 3 Python workers are gone", "bold red")
                display.driver("pid 4711: starting Python, Java and Spark", "yellow")
            display.progress(Progress(epoch, epoch * 30_000, 51_234.5, 600.0 + epoch, 1_234_567, 8, 2))
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
    driver = demo_driver.DriverProcess(tmp_path, 1, None, "")
    try:
        with pytest.raises(UserError, match="this install is broken"):
            list(driver.reports())
    finally:
        driver.kill()


@pytest.mark.spark
@pytest.mark.slow
def test_the_demo_kills_its_driver_and_finds_the_result_exact(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND, "demo", "--epochs=6", "--words=30000", "--keep-store"],
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
    assert re.search(
        r"ok +SIGKILL +\d+ processes, in epoch 3 before its commit; driver 2 ran epoch 3 again", ended.stdout
    )
    assert living("demo") == []
    # What was kept says the same, by other means: two drivers claimed the store, and the last epoch is committed.
    [folder] = tmp_path.iterdir()
    history = Journal.open(open_store(str(folder / "store"))).history
    assert (history.generation, history.epoch) == (2, 5)
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
