"""Stateful queries of NEXMark on real executors, one of which is killed while a migration is under way.

Each takes about half a minute, most of it for new executors to come up: with `MILLSTREAM_KILLED=all` only. By default
test_replicas_under_fire.py kills executors in the middle of a migration.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
from processes import HERE, run

from millstream.nexmark import QUERIES

ALL = os.environ.get("MILLSTREAM_KILLED") == "all"
pytestmark = [
    pytest.mark.spark,
    pytest.mark.slow,
    pytest.mark.skipif(not ALL, reason="takes minutes: MILLSTREAM_KILLED=all"),
]

STATEFUL = [query.name for query in QUERIES.values() if query.is_stateful]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One cluster for all of them: it gets a new executor for each that is killed."""
    folder = tmp_path_factory.mktemp("nexmark")
    code, found, err = run(folder, "local-cluster[2,1,700]", "+".join(STATEFUL), script=HERE / "nexmark_killed_job.py")
    assert code == 0, err
    return dict(found)


@pytest.mark.parametrize("name", STATEFUL)
def test_an_executor_that_dies_in_the_middle_of_a_migration_changes_no_result(
    name: str, results: dict[str, Any]
) -> None:
    found = results[name]
    print(name, found)
    assert found["expected"] > 0, "nothing would be shown"
    assert found["killed"] == 1
    assert found["began"] == 1, "the migration was under way when the executor died, in the next epoch"
    assert found["done"] > 1
    assert found["exact"]
