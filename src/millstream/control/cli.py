"""The command line: `millstream demo`, `run`, `nexmark`, `bench`, and the verbs of `control_commands` and
`modify_commands`.

Rules
-----
- Errors and exit codes are those of `exits`.
- Java is looked for before PySpark is asked to start it, because PySpark's own complaint does not say what to do.
- Commands import what they need when they run, so that `--help` does not load it.
"""

from __future__ import annotations

import ast
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

import millstream
from millstream.control import control_commands, modify_commands
from millstream.control.exits import INTERRUPTED, code_of, complain
from millstream.control.nexmark_command import nexmark
from millstream.control.run_command import run
from millstream.errors import MillstreamError, UserError

_JAVA_VERSIONS = ("17", "21")
_JAVA_MODULE = "jdk.incubator.vector"
_JAVA_PLACES = (Path("/usr/lib/jvm"), Path("/Library/Java/JavaVirtualMachines"))


class _Commands(click.Group):
    """A group of commands that prints our errors the way this file promises."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (MillstreamError, TimeoutError) as error:
            complain(error)
            ctx.exit(code_of(error))
        except KeyboardInterrupt:
            click.echo("Stopped.", err=True)
            ctx.exit(INTERRUPTED)


@click.group(
    cls=_Commands,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Start with `millstream demo`. Queries are written and started in Python: `import millstream as ms`.",
)
@click.version_option(
    millstream.__version__,
    message=f"%(prog)s %(version)s, PySpark {version('pyspark')}, Python {platform.python_version()}",
    prog_name="millstream",
)
def main() -> None:
    """Millstream: stateful stream processing on PySpark, every record counted exactly once.

    Exit codes: 0 good, 1 an error or a refusal, 2 wrong usage, 3 somebody else was quicker (plan again), 4 not over in
    time, 70 a bug in Millstream, 130 Ctrl-C.
    """


for command in (*control_commands.COMMANDS, *modify_commands.COMMANDS):
    main.add_command(command)


main.add_command(nexmark)
main.add_command(run)


@main.command()
@click.option(
    "--epochs",
    type=click.IntRange(8, 1000),
    metavar="N",
    default=40,
    show_default=True,
    help="How many epochs the text lasts for.",
)
@click.option(
    "--words",
    type=click.IntRange(1000, 100_000_000),
    metavar="N",
    default=1_000_000,
    show_default=True,
    help="How many words of text to count.",
)
@click.option("--keep-store", is_flag=True, help="Keep the text, the store and the sink, and say where they are.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    default="millstream-demo.png",
    show_default=True,
    help="Where to write the timeline, as a PNG. It needs matplotlib.",
)
@click.pass_context
def demo(ctx: click.Context, epochs: int, words: int, keep_store: bool, picture: Path) -> None:
    """Count words, rescale the running query, kill its driver, and check the result.

    Runs a word count on a local Spark, on two cores, for about a minute. While it runs, it is rescaled from 2 to 4
    slots, and then to 3. In the middle of that, after an epoch has run and before it is committed, the driver and its
    JVM get a SIGKILL. A new driver goes on from the last commit, and ends the rescale. In the end the state and the
    Parquet sink are compared, word by word, with a sequential count of the same text.

    The exit code is 0 if every word was counted exactly once and the rescales and the kill hit their moments, 1 if not.
    All files but the picture are temporary.
    """
    if not picture.absolute().parent.is_dir():
        raise click.BadParameter(f"there is no folder {picture.absolute().parent}", ctx, param_hint="--picture")
    java_home = find_java()
    from millstream.control.demo import run_demo

    ctx.exit(run_demo(epochs, words, keep_store, picture, java_home))


@main.command(
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
    options_metavar="",
)
@click.argument("name", required=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, args: tuple[str, ...]) -> None:
    """Run the benchmark NAME; without a name, list them.

    ARGS are handed to the benchmark: `millstream bench NAME --help` shows which it knows. Benchmarks are not
    installed; they are in the folder `bench` of a source checkout.
    """
    root = checkout()
    known = benchmarks(root)
    if name is None:
        if not known:
            raise UserError(f"{root / 'bench'} holds nothing that can be run yet")
        width = max(map(len, known))
        for each, about in known.items():
            click.echo(f"  {each:{width}}  {about}".rstrip())
        return
    if name not in known:
        there = ", ".join(known) or "nothing that can be run yet"
        raise UserError(f"no benchmark {name!r} in {root / 'bench'}; it has {there}")
    environment = {**os.environ, "JAVA_HOME": find_java()}
    # Replaced rather than started: signals, the terminal and the exit code are the benchmark's own.
    os.chdir(root)
    os.execve(sys.executable, [sys.executable, "-m", f"bench.{name}", *args], environment)


def checkout() -> Path:
    """The root of the source checkout this package runs from."""
    package = Path(millstream.__file__).resolve().parent
    root = package.parent.parent
    if package.parent.name != "src" or not (root / "pyproject.toml").is_file():
        raise UserError(
            f"benchmarks need a source checkout, and Millstream runs from {package}. Clone the repository, "
            "run `make setup` in it, and use its .venv/bin/millstream"
        )
    return root


def benchmarks(root: Path) -> dict[str, str]:
    """What can be run in the folder `bench`: names, each with the first line of what it says about itself."""
    found = {}
    for path in sorted([*root.glob("bench/*.py"), *root.glob("bench/*/__main__.py")]):
        name = path.parent.name if path.stem == "__main__" else path.stem
        text = path.read_text()
        # Modules that benchmarks share cannot be run, and are not listed.
        if path.parent != root / "bench" or "__main__" in text:
            found[name] = ((ast.get_docstring(ast.parse(text)) or "").splitlines() or [""])[0]
    return found


# -- Java -------------------------------------------------------------------------------------------------------------


def find_java() -> str:
    """The home of a Java that can run Spark: JAVA_HOME, else `java` on the path, else one in the usual places."""
    looked = []
    asked = os.environ.get("JAVA_HOME")
    if asked:
        trouble = _java_trouble(Path(asked))
        if trouble is None:
            return asked
        looked.append(f"JAVA_HOME={asked}: {trouble}")
    else:
        looked.append("JAVA_HOME: not set")
    on_path = _java_on_path()
    if isinstance(on_path, Path):
        trouble = _java_trouble(on_path)
        if trouble is None:
            return str(on_path)
        looked.append(f"java on PATH, {on_path}: {trouble}")
    else:
        looked.append(f"java on PATH: {on_path}")
    for place in _JAVA_PLACES:
        homes = sorted({path.parent.parent for path in place.glob("**/bin/java")})
        for home in homes:
            trouble = _java_trouble(home)
            if trouble is None:
                return str(home)
            looked.append(f"{home}: {trouble}")
        if not homes:
            looked.append(f"{place}: nothing there")
    raise UserError(
        f"Spark needs Java {' or '.join(_JAVA_VERSIONS)} with the module {_JAVA_MODULE}, and there is none. "
        "Looked at:\n  "
        + "\n  ".join(looked)
        + "\nInstall one, for example with `apt-get install openjdk-17-jre-headless` or `brew install openjdk@17`, "
        "or set JAVA_HOME to one that is already there."
    )


def _java_on_path() -> Path | str:
    """The home of `java` on the path, or what is wrong. It may be a link or a stand-in, so it is asked."""
    java = shutil.which("java")
    if java is None:
        return "not there"
    told = _run(java, "-XshowSettings:properties", "-version")
    home = re.search(r"^\s*java\.home = (.+)$", told or "", re.MULTILINE)
    return Path(home[1].strip()) if home else f"{java} does not run"


def _java_trouble(home: Path) -> str | None:
    """Why Spark cannot run on this Java; None if it can."""
    java = home / "bin" / "java"
    if not java.is_file():
        return "there is no bin/java"
    modules = _run(str(java), "--list-modules")
    found = re.search(r"^java\.base@(\d+)", modules or "", re.MULTILINE)
    if modules is None or found is None:
        return "does not run, or is older than Java 9"
    if found[1] not in _JAVA_VERSIONS:
        return f"is Java {found[1]}"
    return None if f"{_JAVA_MODULE}@" in modules else f"lacks the module {_JAVA_MODULE} (a trimmed runtime)"


def _run(*command: str) -> str | None:
    try:
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ended.stdout + ended.stderr if ended.returncode == 0 else None


if __name__ == "__main__":
    main()
