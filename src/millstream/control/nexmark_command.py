"""The command `millstream nexmark`: what it takes. What it does is in `nexmark_run`.

Rules
-----
- Nothing is loaded to show the help; the names of the queries are listed here, and a test compares them with the
  catalogue.
"""

from __future__ import annotations

import os
import re
from typing import Any

import click

NAMES = ("q1", "q2", "q3", "q4", "q5", "q6", "q7", "q8", "nbq5", "nbq8", "nbqx")


def rescale_of(given: str) -> tuple[int, int]:
    """An epoch and a number of slots."""
    found = re.fullmatch(r"(\d+):(\d+)", given)
    if found is None or int(found[2]) < 1:
        raise click.BadParameter(
            f"{given!r}; give the epoch after which to rescale and the number of slots, such as 5:4"
        )
    return int(found[1]), int(found[2])


def strategy_name(given: str) -> str:
    """The name of a migration strategy."""
    if not re.fullmatch(r"all-at-once|fluid|matched|batched:[1-9]\d*", given):
        raise click.BadParameter(
            f"{given!r}; give all-at-once, fluid, matched, or batched:N with N bins for each epoch"
        )
    return given


@click.command()
@click.argument("query", type=click.Choice(NAMES), metavar="QUERY")
@click.option(
    "--events",
    type=click.IntRange(50),
    metavar="N",
    default=1_000_000,
    show_default=True,
    help="How many events there are, people, auctions and bids together.",
)
@click.option(
    "--per-epoch",
    type=click.IntRange(1),
    metavar="N",
    default=50_000,
    show_default=True,
    help="How many events an epoch takes; epochs follow each other as fast as they go.",
)
@click.option(
    "--rate", type=click.IntRange(1), metavar="N", help="N events a second instead, whether or not the query keeps up."
)
@click.option(
    "--dilation", type=click.IntRange(1), metavar="N", help="Event time goes N times as fast.  [default: the query's]"
)
@click.option("--slots", type=click.IntRange(1), metavar="N", default=2, show_default=True, help="Slots at the start.")
@click.option(
    "--rescale",
    "rescales",
    type=rescale_of,
    metavar="EPOCH:SLOTS",
    multiple=True,
    help="Change the number of slots while the query runs, after this epoch. May be given several times.",
)
@click.option(
    "--strategy",
    type=strategy_name,
    metavar="NAME",
    default="batched:256",
    show_default=True,
    help="How a rescale is spread over epochs: all-at-once, fluid, matched, batched:N.",
)
@click.option(
    "--store",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Keep store and output there; a run that was stopped goes on.  [default: temporary]",
)
@click.option("--master", default="local[2]", show_default=True, help="Spark's master.")
@click.option("--verify/--no-verify", default=True, help="Compare with a batch query of Spark.  [default: verify]")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON, and nothing else.")
@click.pass_context
def nexmark(ctx: click.Context, /, **given: Any) -> None:
    """Run a query of the NEXMark benchmark, and check its result.

    QUERY is q1 to q8, or Rhino's nbq5, nbq8 or nbqx. Events come from a generator that is the same on every machine.
    In the end what the query produced is compared with what a plain Spark query computes of the same events at once.

    The exit code is 0 if they are the same, 1 if they differ.
    """
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is None:
        from millstream.control.cli import find_java

        os.environ["JAVA_HOME"] = find_java()
    from millstream.control.nexmark_run import Request, run_nexmark

    ctx.exit(run_nexmark(Request(**given)))
