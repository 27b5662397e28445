"""The command line: what it prints, and with which code it ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import millstream
from millstream.control import cli
from millstream.errors import (
    ConflictError,
    DamagedObject,
    Fenced,
    InvariantViolation,
    MillstreamError,
    StepError,
    UserError,
)


def run(*args: str) -> Result:
    return CliRunner().invoke(cli.main, list(args))


@pytest.fixture
def no_java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Java; returns a folder in which a test may put one."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "path"))
    monkeypatch.setattr(cli, "_JAVA_PLACES", (tmp_path / "jvm",))
    return tmp_path / "jvm"


def install_java(home: Path, *modules: str) -> Path:
    """A stand-in for Java that lists modules."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text("#!/bin/sh\n" + "".join(f"echo {module}\n" for module in modules))
    java.chmod(0o755)
    return home


def install_checkout(root: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    package = root / "src" / "millstream"
    package.mkdir(parents=True)
    (root / "pyproject.toml").touch()
    (root / "bench").mkdir()
    monkeypatch.setattr(millstream, "__file__", str(package / "__init__.py"))
    return root / "bench"


# -- help


def test_help_names_every_command_and_where_to_start() -> None:
    result = run("--help")
    assert result.exit_code == 0
    assert "demo" in result.stdout
    assert "bench" in result.stdout
    assert "Start with `millstream demo`" in result.stdout


@pytest.mark.parametrize("command", ["demo", "nexmark", "bench"])
def test_every_command_has_help(command: str) -> None:
    result = run(command, "-h")
    assert result.exit_code == 0
    assert f"Usage: main {command}" in result.stdout


def test_the_version_names_what_a_report_needs() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert f"millstream {millstream.__version__}, PySpark 4." in result.stdout


def test_an_unknown_command_is_wrong_usage() -> None:
    result = run("dmeo")
    assert result.exit_code == 2
    assert "dmeo" in result.stderr


def test_an_option_out_of_range_is_wrong_usage() -> None:
    result = run("demo", "--epochs", "1")
    assert result.exit_code == 2
    assert "--epochs" in result.stderr


def test_a_picture_in_a_folder_that_is_not_there_is_wrong_usage(tmp_path: Path) -> None:
    result = run("demo", "--picture", str(tmp_path / "gone" / "a.png"))
    assert result.exit_code == 2
    assert "there is no folder" in result.stderr


# -- errors


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UserError("the store is a file"), 1),
        (StepError("count", 3, "'a'", "Row(word='a')", "ValueError: no"), 1),
        (DamagedObject("seg/1", "12 bytes", "13 bytes"), 1),
        (MillstreamError("something else"), 1),
        (ConflictError("look again"), 3),
        (Fenced("a newer driver"), 3),
        (InvariantViolation("two commits of one epoch"), 70),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_is_one_text_without_traceback_and_its_class_is_the_exit_code(
    error: MillstreamError, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "find_java", lambda: (_ for _ in ()).throw(error))
    result = run("demo")
    assert result.exit_code == code
    assert result.stdout == ""
    assert str(error) in result.stderr
    assert "Traceback" not in result.stderr
    assert ("please report" in result.stderr) == isinstance(error, InvariantViolation)


def test_an_error_is_red_in_a_terminal_unless_colours_are_unwanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_java", lambda: (_ for _ in ()).throw(UserError("no")))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert CliRunner().invoke(cli.main, ["demo"], color=True).stderr == "\x1b[31mno\x1b[0m\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert CliRunner().invoke(cli.main, ["demo"], color=True).stderr == "no\n"


def test_ctrl_c_ends_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_java", lambda: (_ for _ in ()).throw(KeyboardInterrupt))
    result = run("demo")
    assert result.exit_code == 130
    assert "Traceback" not in result.output


def test_what_is_not_our_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "find_java", lambda: (_ for _ in ()).throw(ZeroDivisionError))
    assert isinstance(run("demo").exception, ZeroDivisionError)


# -- Java


def test_without_java_one_is_told_where_it_was_looked_for_and_what_to_do(no_java: Path) -> None:
    result = run("demo")
    assert result.exit_code == 1
    for text in ("JAVA_HOME: not set", "java on PATH: not there", str(no_java), "apt-get install", "set JAVA_HOME"):
        assert text in result.stderr


def test_a_java_that_is_unsuitable_is_named_with_the_reason(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = install_java(no_java / "old", "java.base@11.0.2", "jdk.incubator.vector@11.0.2")
    trimmed = install_java(no_java / "trimmed", "java.base@17.0.9")
    monkeypatch.setenv("JAVA_HOME", str(no_java / "gone"))
    with pytest.raises(UserError) as raised:
        cli.find_java()
    assert f"JAVA_HOME={no_java / 'gone'}: there is no bin/java" in str(raised.value)
    assert f"{old}: is Java 11" in str(raised.value)
    assert f"{trimmed}: lacks the module jdk.incubator.vector" in str(raised.value)


def test_a_suitable_java_is_found_in_the_usual_places(no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_java(no_java / "a", "java.base@11.0.2")
    good = install_java(no_java / "b", "java.base@21.0.2", "jdk.incubator.vector@21.0.2")
    assert cli.find_java() == str(good)
    chosen = install_java(no_java / "c", "java.base@17", "jdk.incubator.vector@17")
    monkeypatch.setenv("JAVA_HOME", str(chosen))
    assert cli.find_java() == str(chosen)


# -- benchmarks


def test_bench_without_a_name_lists_what_can_be_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = install_checkout(tmp_path, monkeypatch)
    (bench / "__init__.py").touch()
    (bench / "speed.py").write_text('"""How quick it is.\n\nMore."""\nif __name__ == "__main__":\n    pass\n')
    (bench / "shared.py").write_text('"""What benchmarks share."""\n')
    (bench / "moves").mkdir()
    (bench / "moves" / "__main__.py").write_text("pass\n")
    result = run("bench")
    assert result.exit_code == 0
    assert result.stdout == "  moves\n  speed  How quick it is.\n"


def test_bench_hands_all_arguments_on(tmp_path: Path, no_java: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = install_checkout(tmp_path, monkeypatch)
    (bench / "speed.py").write_text('if __name__ == "__main__":\n    pass\n')
    java = install_java(no_java / "good", "java.base@17", "jdk.incubator.vector@17")
    calls: list[tuple[list[str], str]] = []
    monkeypatch.setattr(os, "execve", lambda program, command, env: calls.append((command, env["JAVA_HOME"])))
    monkeypatch.chdir(tmp_path.parent)
    result = run("bench", "speed", "--help", "--rows=3", "-v", "x")
    assert result.exit_code == 0
    assert calls == [([sys.executable, "-m", "bench.speed", "--help", "--rows=3", "-v", "x"], str(java))]
    assert Path.cwd() == tmp_path.resolve()


def test_bench_names_what_there_is_when_a_name_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = install_checkout(tmp_path, monkeypatch)
    (bench / "speed.py").write_text('if __name__ == "__main__":\n    pass\n')
    result = run("bench", "sped")
    assert result.exit_code == 1
    assert "no benchmark 'sped'" in result.stderr
    assert "it has speed" in result.stderr


def test_bench_says_so_when_there_is_no_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site-packages" / "millstream"
    monkeypatch.setattr(millstream, "__file__", str(package / "__init__.py"))
    result = run("bench")
    assert result.exit_code == 1
    assert "source checkout" in result.stderr
    assert str(package) in result.stderr
