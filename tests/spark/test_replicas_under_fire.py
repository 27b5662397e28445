"""Whatever dies, stands still, fills up or is damaged, in whichever phase: results are those of a sequential run.

One query on one store lives through all of it, on real executors, which Spark replaces as they are killed. Its lives
(under_fire_job.py) are those of several drivers: some are killed in the middle of a handover, and each of the others
goes on from there with empty caches. By default there are two lives with a case each, chosen by `MILLSTREAM_SEED`; with
`MILLSTREAM_KILLED=all` there are eight, with all cases, in an order made from it.

Which test covers what, beside this one's cases (`like/this`):

| fault | phase | covered by |
| --- | --- | --- |
| origin, first or second replica killed | replication | `replication/.../executor` |
| its agent killed | replication | `replication/.../agent`; test_replicas.py, all at once |
| its agent does not answer | replication | `replication/.../frozen`, `.../naps`; test_agent.py `test_a_peer_that_...` |
| target or origin killed | prepare, catch up | `handover/.../catch up`; test_handing_over.py `test_a_target_...` |
| the target's agent killed | prepare, catch up | `handover/agent/catch up` |
| target or origin killed | writing through | `handover/.../writing` |
| target or origin killed | cut over | `handover/.../planned`, `executed`, `committed`; test_nexmark_killed.py |
| driver killed | all of these | `handover/driver/...` |
| executor killed | modification | `modification/...`, while state moves; test_modified_killed.py |
| driver killed | modification | test_modified_killed.py |
| two workers, all workers | steady | `several/2`, `several/all`; test_replicating.py |
| cold start, by a new driver without caches | | every life but the first |
| an executor is back from the dead | steady | `back` |
| caches damaged or stale | recovery | `damaged`; test_agent.py for one bit; test_cache.py |
| full disk | replication, recovery | `full`; test_agent.py `test_a_disk_that_cannot_be_written_...` |
| slow disk | replication, recovery | `crawling` |
| slow network | catch up | `deadline`; test_handing_over.py `test_a_migration_that_can_never_catch_up_...` |
| a worker is cut off from its peers, or from the driver | steady | test_standalone.py |
| wrong token, query, garbage | replication | test_agent.py, for peers and for the driver |
| more replicas than workers | | the lives `slow` and `small`; test_replicating.py |
| a cache smaller than a slot | | the life `small`; test_replicating.py, test_agent.py |
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from processes import HERE, check_counts, run

pytestmark = [pytest.mark.spark, pytest.mark.slow]

ALL = os.environ.get("MILLSTREAM_KILLED") == "all"
MASTER = "local-cluster[3,1,700]"
CHAIN = ("origin", "first", "second")
MOMENTS = ("planned", "executed", "committed")


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder with a disk of its own for the caches, if one can be had; else the case `full` has nothing to fill."""
    caches = tmp_path / "caches"
    caches.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={256 << 20}", "tmpfs", str(caches)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    yield tmp_path
    if mounted:
        subprocess.run(["umount", "-l", str(caches)], check=True)


@pytest.fixture
def slow_folder(tmp_path: Path) -> Iterator[Path]:
    """A folder whose caches lie on a disk that the kernel slows down: FOLDER/slow says for which group of processes."""
    image, caches, group = tmp_path / "image", tmp_path / "caches", Path("/sys/fs/cgroup/blkio", f"slow-{os.getpid()}")
    caches.mkdir()
    with image.open("wb") as file:
        file.truncate(256 << 20)
    done: list[list[str]] = []
    try:
        group.mkdir()
        done.append(["rmdir", str(group)])
        ran(["mkfs.ext4", "-q", str(image)])
        device = ran(["losetup", "-f", "--show", str(image)]).strip()
        done.append(["losetup", "-d", device])
        ran(["mount", "-o", "sync", device, str(caches)])  # who writes waits until it is written
        done.append(["umount", "-l", str(caches)])
        number = os.stat(device).st_rdev
        (tmp_path / "slow").write_text(f"{group} {os.major(number)}:{os.minor(number)}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no disk can be made that is slow: {error}")
    finally:
        if not (tmp_path / "slow").exists():
            undo(done)
    yield tmp_path
    undo(done)


def ran(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def undo(done: list[list[str]]) -> None:
    for command in reversed(done):
        subprocess.run(command, capture_output=True, check=False)


def cases(rng: random.Random) -> list[tuple[str, list[str]]]:
    """Lives, and the cases of each, in order."""
    phases = ["catch up", "writing", *MOMENTS]
    first = [f"handover/{party}/{phase}" for party in ("target", "origin") for phase in phases]
    first.append("handover/agent/catch up")
    second = [f"replication/{party}/{how}" for party in CHAIN for how in ("executor", "agent", "naps", "frozen")]
    changed, others = (
        [f"modification/{moment}" for moment in MOMENTS],
        ["several/2", "several/all", "back", "damaged", "full"],
    )
    second += [*changed, *others]
    if not ALL:
        copied = [f"replication/{rng.choice(CHAIN)}/{how}" for how in ("executor", "frozen")]
        first, second = [], [rng.choice([*first, changed[0], "several/2", "damaged", *copied])]
    rng.shuffle(first)
    rng.shuffle(second)
    killed = phases if ALL else [rng.choice(phases)]
    lives = [("handover", [f"handover/driver/{phase}"]) for phase in killed]
    lives[0][1][:0] = first
    lives.append(("chain", second))
    if ALL:
        lives += [("slow", ["deadline", "several/2"]), ("small", ["replication/first/executor", "several/2"])]
    return lives


def test_results_are_exact_whatever_dies_in_whichever_phase(folder: Path, rng: random.Random) -> None:
    go_through(folder, cases(rng))


@pytest.mark.skipif(not ALL, reason="takes a minute: MILLSTREAM_KILLED=all")
def test_results_are_exact_when_the_disk_of_caches_becomes_slow(slow_folder: Path) -> None:
    go_through(slow_folder, [("disk", ["crawling"])])


def go_through(folder: Path, lives: list[tuple[str, list[str]]]) -> None:
    found: Any = None
    for life, chosen in lives:
        code, found, err = run(folder, MASTER, life, "+".join(chosen), script=HERE / "under_fire_job.py")
        (folder / "told").touch()
        told = [json.loads(line) for line in (folder / "told").read_text().splitlines()]
        print(life, chosen, *told, sep="\n  ")
        (folder / "told").unlink()
        killed = chosen[-1].startswith("handover/driver")
        assert code == (-signal.SIGKILL if killed else 0), err
        assert [each["case"] for each in told if "case" in each] == (chosen[:-1] if killed else chosen)
        for caches in (folder / "caches").iterdir():
            subprocess.run(["rm", "-rf", str(caches)], check=True)
    assert found["left behind"] == []
    check_counts(folder, found)
