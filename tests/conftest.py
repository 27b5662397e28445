"""Shared fixtures. Seeds are printed on failure and come from MILLSTREAM_SEED where it is set."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from pyspark.sql import SparkSession

import millstream as ms
from halves import pytest_addoption, pytest_configure  # noqa: F401  hooks: how `make test` shares tests

# A JVM of a test lives for seconds: its second compiler takes a third of its processor time and pays off later.
os.environ.setdefault("SPARK_SUBMIT_OPTS", "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC")

# Whoever starts tests in the background may have Ctrl-C ignored, and children would be deaf to it, too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "house",
    deadline=None,
    max_examples=200 if os.environ.get("MILLSTREAM_KILLED") == "all" else 40,
    print_blob=True,
    derandomize="MILLSTREAM_SEED" not in os.environ,  # the same examples every time, unless a seed is asked for
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("house")


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    # Spark's workers must be able to import what tests define.
    here = Path(__file__).parent
    os.environ["PYTHONPATH"] = os.pathsep.join([str(here), str(here / "spark"), os.environ.get("PYTHONPATH", "")])
    session = ms.session(
        "millstream-tests",
        master="local[2]",
        settings={
            "spark.ui.enabled": "false",
            "spark.sql.shuffle.partitions": "2",
            "spark.driver.memory": "2g",
            "spark.sql.session.timeZone": "UTC",
        },
    )
    session.sparkContext.setLogLevel("OFF")
    yield session
    session.stop()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed that reproduces the test: MILLSTREAM_SEED, else the same one every time."""
    number = int(os.environ.get("MILLSTREAM_SEED", "20190713"))
    print(f"MILLSTREAM_SEED={number}")
    return number


@pytest.fixture
def rng(seed: int) -> random.Random:
    return random.Random(seed)
