"""The processes of agents: how they begin, whom they end with, and what stays of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from millstream.store import agent as agent_module
from millstream.store.agent import FlightPeer, Settings, launch
from millstream.store.cache import CacheSettings
from millstream.store.journal import Journal
from millstream.store.objects import open_store

TOKEN = "a token"


def started(folder: Path, owner: int, **changes: Any) -> str:
    """An agent in a process of its own."""
    store = open_store(str(folder / "store"))
    journal = Journal.open(store)
    cache = CacheSettings(str(folder / "caches"))
    settings = Settings("127.0.0.1", TOKEN, journal.store_id, store.uri, cache=cache, owner=owner)
    return launch(replace(settings, **changes))


def gone(address: str, query: str, within_s: float = 20.0) -> bool:
    """Whether nobody answers there any more, soon."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            FlightPeer(address, TOKEN, query).call("progress", timeout=1.0)
        except OSError:
            return True
        time.sleep(0.1)
    return False


def test_an_agent_ends_with_its_worker(tmp_path: Path) -> None:
    worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    address = started(tmp_path, worker.pid)
    query = Journal.open(open_store(str(tmp_path / "store"))).store_id
    assert FlightPeer(address, TOKEN, query).progress().number == -1
    [agent] = agent_module.agents_of(worker.pid, query)
    lower = min(19, os.getpriority(os.PRIO_PROCESS, worker.pid) + agent_module.NICE)
    assert os.getpriority(os.PRIO_PROCESS, agent) == lower
    assert os.getsid(agent) == os.getsid(0), "priorities count within a session"
    assert os.getpgid(agent) == agent, "nobody's signals reach it by its group"
    assert list((tmp_path / "caches").glob(f"millstream-cache/*/*+{worker.pid}+*"))
    ended = os.pidfd_open(agent)
    os.kill(worker.pid, signal.SIGKILL)
    worker.wait()
    assert gone(address, query)
    assert select.select([ended], [], [], 20)[0]
    os.close(ended)
    assert not list((tmp_path / "caches").glob(f"millstream-cache/*/*+{worker.pid}+*"))


def test_an_agent_ends_with_its_query(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    address = started(tmp_path, worker.pid)
    query = Journal.open(open_store(str(tmp_path / "store"))).store_id
    FlightPeer(address, TOKEN, query).call("end")
    assert gone(address, query)


def until(over: Callable[[], bool], within_s: float = 20.0) -> bool:
    """Whether something comes about soon."""
    deadline = time.monotonic() + within_s
    while not (found := over()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.fixture
def worker() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("busy", [False, True])
def test_a_cache_goes_with_its_worker_though_the_query_and_its_agent_have_ended_before(
    tmp_path: Path, worker: subprocess.Popen[bytes], busy: bool
) -> None:
    query = Journal.open(open_store(str(tmp_path / "store"))).store_id
    with contextlib.ExitStack() as sockets:
        silent = sockets.enter_context(socket.create_server(("127.0.0.1", 0)))
        silent.settimeout(20)
        for again in (False, True):
            address = started(tmp_path, worker.pid)
            [agent] = agent_module.agents_of(worker.pid, query)
            ended = os.pidfd_open(agent)
            asked = FlightPeer(address, TOKEN, query)
            ask = threading.Thread(target=lambda asked=asked: refused(asked, silent.getsockname()[1]))
            if busy:  # it asks one who does not answer when it is told to end
                ask.start()
                sockets.enter_context(silent.accept()[0])
            FlightPeer(address, TOKEN, query).call("end")
            if busy:
                ask.join(20)
            if again:
                assert select.select([ended], [], [], 20)[0], "one waits already"
                os.close(ended)
            else:
                assert until(lambda agent=agent: _command(agent)[-3:-2] == [agent_module.WAITER])
                waiter, waits = agent, ended
            assert agent_module.agents_of(worker.pid, query) == []
            assert _command(waiter), "somebody waits for the end of the worker"
    [directory] = (tmp_path / "caches").glob(f"millstream-cache/*/*+{worker.pid}+*")
    worker.kill()
    worker.wait()
    assert select.select([waits], [], [], 20)[0]
    os.close(waits)
    assert not directory.exists()


@pytest.mark.parametrize("_", range(3))
def test_a_cache_goes_though_its_worker_ends_just_when_the_agent_does(
    tmp_path: Path, worker: subprocess.Popen[bytes], _: int
) -> None:
    query = Journal.open(open_store(str(tmp_path / "store"))).store_id
    address = started(tmp_path, worker.pid)
    [agent] = agent_module.agents_of(worker.pid, query)
    ended = os.pidfd_open(agent)
    [directory] = (tmp_path / "caches").glob(f"millstream-cache/*/*+{worker.pid}+*")
    FlightPeer(address, TOKEN, query).call("end")
    worker.kill()
    worker.wait()
    assert select.select([ended], [], [], 20)[0]
    os.close(ended)
    assert not directory.exists()


def refused(peer: FlightPeer, port: int) -> None:
    """Has an agent reach for one who does not answer; it ends before that is known."""
    with contextlib.suppress(OSError):
        peer.reach([f"127.0.0.1:{port}"], 20.0)


def _command(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().rstrip("\0").split("\0")
    except OSError:
        return []


def test_an_agent_takes_the_place_of_the_one_before(tmp_path: Path, worker: subprocess.Popen[bytes]) -> None:
    first = started(tmp_path, worker.pid)
    second = started(tmp_path, worker.pid)
    query = Journal.open(open_store(str(tmp_path / "store"))).store_id
    assert gone(first, query)
    assert FlightPeer(second, TOKEN, query).progress().number == -1
    FlightPeer(second, TOKEN, query).call("end")
    assert gone(second, query)


def test_an_agent_that_cannot_begin_is_an_error_with_a_reason(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OSError, match="could not be started"):
        started(tmp_path, os.getpid(), query="another")
    assert "another store" in capfd.readouterr().err
