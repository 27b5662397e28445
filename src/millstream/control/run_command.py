"""The command `millstream run`: starts the query of a file, and shows it until it ends or is stopped.

Rules
-----
- The file is the user's: it is run once, as a module of its own name, so that workers can load what it defines where it
  lies beside them or is sent along. What is wrong with it is told as what it is.
- Ctrl-C stops the query between two epochs; running the command again goes on.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import click

from millstream.errors import UserError

if TYPE_CHECKING:
    from millstream.control.running import RunningQuery
    from millstream.control.start import Query

SHOW_S = 2.0


@click.command()
@click.argument("file", metavar="FILE[:NAME]")
@click.option("--store", required=True, metavar="DIR", help="Where state is kept: a directory, or s3:// and the like.")
@click.option("--slots", type=click.IntRange(1), default=2, show_default=True, metavar="N", help="Slots at first.")
@click.option(
    "--replicas", type=click.IntRange(0, 16), metavar="N", help="Replicas; by default one if there are two hosts."
)
@click.option("--checkpoint", metavar="DIR", help="Where Spark keeps its offsets; beside a local store by default.")
@click.option("--cache-dir", metavar="DIR", help="Where workers keep the state they read and write.")
@click.option(
    "--fetch-limit", type=click.FloatRange(1), metavar="BYTES", help="A worker's bytes a second from the store."
)
@click.option("--replicate-limit", type=click.FloatRange(1), metavar="BYTES", help="The same, from other workers.")
@click.option("--adapt", is_flag=True, help="Have the query balance its own load.")
@click.option("--policy", metavar="NAME", help="What FILE calls the policy to adapt by; implies --adapt.")
@click.option("--dry-run", is_flag=True, help="With --adapt: tell what would be done, and do nothing.")
@click.option("--now", "available_now", is_flag=True, help="Take what is there, and end.")
@click.option("--master", default="local[2]", show_default=True, help="Spark's master.")
@click.option("--token", metavar="TEXT", help="Guards the store, as in Query.start.")
@click.pass_context
def run(
    ctx: click.Context,
    file: str,
    store: str,
    slots: int,
    replicas: int | None,
    checkpoint: str | None,
    cache_dir: str | None,
    fetch_limit: float | None,
    replicate_limit: float | None,
    adapt: bool,
    policy: str | None,
    dry_run: bool,
    available_now: bool,
    master: str,
    token: str | None,
) -> None:
    """Start the query that FILE defines, and show it until it ends, or until Ctrl-C.

    FILE is a Python file. NAME is what it calls its query, `query` by default: a `Query`, or a function that is given
    the Spark session and makes one. Run the same again, and it goes on where it was.
    """
    if dry_run and not (adapt or policy):
        raise click.UsageError("--dry-run is for --adapt", ctx)
    path, _, name = file.partition(":")
    module = loaded(Path(path))
    if policy is not None and not hasattr(module, policy):
        raise UserError(f"{path} has no {policy!r}; --policy names a policy that it makes, such as ms.Adaptive(...)")
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is None:
        from millstream.control.cli import find_java

        os.environ["JAVA_HOME"] = find_java()
    from millstream.spark.session import session

    spark = SparkSession.getActiveSession() or session(Path(path).stem, master=master)
    query = query_of(module, name or "query", spark)
    running = query.start(
        spark,
        store,
        slots=slots,
        replicas=replicas,
        checkpoint=checkpoint,
        cache_dir=cache_dir,
        fetch_limit=fetch_limit,
        replicate_limit=replicate_limit,
        adapt=adapt if policy is None else getattr(module, policy),
        adapt_dry_run=dry_run,
        token=token,
        trigger={"availableNow": True} if available_now else None,
    )
    click.echo(f"{running.name} runs on {store}; Ctrl-C stops it between two epochs.")
    ended = threading.Event()
    shown = threading.Thread(target=_show, args=(running, ended), name="millstream-show", daemon=True)
    shown.start()
    try:
        running.await_termination()
    finally:
        ended.set()
        shown.join(timeout=2 * SHOW_S)
    click.echo(f"{running.name} has ended after epoch {running.epoch}.")


def loaded(path: Path) -> ModuleType:
    """The module that a file is."""
    if not path.is_file():
        raise UserError(f"there is no file {path}; give a Python file that defines a query")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise UserError(f"{path} is no Python file; give one that defines a query")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise UserError(f"{path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def query_of(module: ModuleType, name: str, spark: Any) -> Query:
    """The query that a module calls by a name, or makes."""
    from millstream.control.start import Query

    found = getattr(module, name, None)
    queries = [known for known, value in vars(module).items() if isinstance(value, Query)]
    if found is None:
        there = f"it has {', '.join(queries)}" if queries else "it has no query"
        raise UserError(f"{module.__file__} has no {name!r}; {there}. Give FILE:NAME")
    if callable(found) and not isinstance(found, Query):
        found = found(spark)
    if not isinstance(found, Query):
        raise UserError(
            f"{name!r} is {type(found).__name__}, expected a Query, or a function of a session that makes one"
        )
    return found


def _show(running: RunningQuery, ended: threading.Event) -> None:
    """A line now and then, and each decision."""
    told, over = -1, False
    while not over:
        over = ended.wait(SHOW_S)
        if not over:
            status = running.status()
            rate = f"{status.records_per_second:,.0f} records/s, " if status.records else ""
            click.echo(f"epoch {status.epoch}: {rate}{status.slots} slots, {status.state_bytes / 1e6:,.1f} MB of state")
        for decided in running.decisions():
            if decided.epoch > told:
                click.echo(str(decided))
                told = decided.epoch
