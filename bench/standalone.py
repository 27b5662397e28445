"""A Spark standalone cluster on this machine, whose workers come and go: a master and workers as processes.

    with standalone(folder, workers=2) as cluster:
        spark = ms.session("job", master=cluster.master, settings=cluster.settings())
        cluster.add()                  # another worker joins
        cluster.decommission("w1")     # one is told to go
        cluster.kill("w2")             # one is gone, with its executors

Rules
-----
- Spark's own master and worker, as `spark-class` starts them. Each worker has one core, and a work directory and an
  address of its own: of loopback, or with `network` that of a host of `bench.namespaces`. The master is on the host
  `driver`, to which the thread that makes the cluster moves, too.
- Every process ends with the one that made the cluster, whatever ends that. Executors end with their workers.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

import pyspark

from bench.namespaces import Network, children_of, command

DRIVER = "driver"
_JVM = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
_WAIT_S = 60.0

T = TypeVar("T")


class Standalone:
    """A master and its workers. Made by `standalone`."""

    def __init__(self, folder: Path, network: Network | None, daemons: Mapping[str, str], memory: str) -> None:
        self.folder, self.network, self._memory = folder, network, memory
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "conf").mkdir(exist_ok=True)  # and not whatever the machine's own Spark is set to
        self.address = "127.0.0.1"
        if network is not None:
            self.address = network.addresses.get(DRIVER) or network.add(DRIVER)
        self._daemons = {
            "spark.decommission.enabled": "true",
            "spark.master.rest.enabled": "false",
            "spark.ui.enabled": "false",
            **daemons,
        }
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        self._count = 0 if network is None else len(network.addresses) - 1  # of clusters before this one, too
        self.master = ""

    def begin(self) -> None:
        """Starts the master."""
        if self.network is not None:
            self.network.enter(DRIVER)
        words = ["org.apache.spark.deploy.master.Master", "--host", self.address, "--port", "0", "--webui-port", "0"]
        log = self._start("master", words, self.address, [])
        [self.master] = self._said("master", log, r"Starting Spark master at (spark://\S+)")

    @property
    def workers(self) -> list[str]:
        """The workers whose processes are there, by name."""
        return [name for name in self.addresses if self._processes[name].poll() is None]

    def settings(self) -> dict[str, str]:
        """What a session of this cluster is made with, besides its master."""
        return {
            "spark.ui.enabled": "false",
            "spark.driver.memory": "1g",
            "spark.driver.host": self.address,
            "spark.driver.bindAddress": self.address,
            "spark.executor.memory": "600m",
            "spark.executor.cores": "1",
            "spark.executor.extraJavaOptions": _JVM,
            "spark.decommission.enabled": "true",
        }

    def add(self) -> str:
        """Another worker joins; its name. It is registered when this returns."""
        self._count += 1
        name = f"w{self._count}"
        address, prefix = f"127.0.0.{10 + self._count}", []
        if self.network is not None:
            address = self.network.add(name)
            prefix = self.network.inside(name)
        words = ["org.apache.spark.deploy.worker.Worker", "--host", address, "--port", "0", "--webui-port", "0"]
        words += ["--cores", "1", "--memory", self._memory, "--work-dir", str(self.folder / name), self.master]
        log = self._start(name, words, address, prefix)
        self.addresses[name] = address
        self._said(name, log, r"Successfully registered with master")
        return name

    def _start(self, name: str, words: list[str], address: str, prefix: list[str]) -> Path:
        home = Path(pyspark.__file__).parent
        options = [_JVM, *(f"-D{key}={value}" for key, value in self._daemons.items())]
        env = {
            **os.environ,
            "SPARK_HOME": str(home),
            "SPARK_CONF_DIR": str(self.folder / "conf"),
            "SPARK_LOCAL_IP": address,
            "SPARK_DAEMON_MEMORY": "256m",
            "SPARK_DAEMON_JAVA_OPTS": " ".join(options),
            "SPARK_LOCAL_DIRS": str(self.folder / f"{name}-local"),
        }
        log = self.folder / f"{name}.log"
        self._processes[name] = command(prefix, [str(home / "bin" / "spark-class"), *words], log, env)
        return log

    def _said(self, name: str, log: Path, pattern: str) -> list[str]:
        def found() -> list[str]:
            if self._processes[name].poll() is not None:
                raise RuntimeError(f"{name} has ended:\n{log.read_text()[-4000:]}")
            return re.findall(pattern, log.read_text())

        return wait_for(found, f"{name} did not begin; see {log}")

    def executors(self, name: str) -> list[int]:
        """The processes of a worker's executors."""
        return children_of(self._processes[name].pid)

    def decommission(self, name: str) -> None:
        """Tells a worker to go. Spark gives its executors no more tasks, and they end when they have none."""
        self._processes[name].send_signal(signal.SIGPWR)

    def end(self, name: str) -> None:
        """Ends a worker that has no executors any more."""
        wait_for(lambda: not self.executors(name), f"{name} still has executors")
        self._processes[name].terminate()
        self._processes[name].wait()

    def kill(self, name: str) -> None:
        """A worker is gone at once, with its executors."""
        process = self._processes[name]
        executors = [] if process.poll() is not None else self.executors(name)
        process.kill()
        for executor in executors:
            with contextlib.suppress(ProcessLookupError):
                os.kill(executor, signal.SIGKILL)
        process.wait()

    def cut(self, one: str, other: str) -> None:
        """Lets nothing through between two of the workers and `driver`. Only with a network."""
        assert self.network is not None, "without a network there is nothing to cut"
        self.network.cut(one, other)

    def heal(self, one: str, other: str) -> None:
        """Lets everything through again."""
        assert self.network is not None, "without a network there is nothing to heal"
        self.network.heal(one, other)

    def close(self) -> None:
        """Ends all processes."""
        for name in reversed(self._processes):
            self.kill(name)


@contextlib.contextmanager
def standalone(
    folder: Path,
    workers: int,
    network: bool | Network = False,
    daemons: Mapping[str, str] | None = None,
    memory: str = "700m",
) -> Iterator[Standalone]:
    """A cluster with so many workers. `daemons` are settings of the master and the workers themselves.

    With `network`, raises `bench.namespaces.NoNamespaces` where there can be none. A process that has several clusters
    after each other gives them one network: Spark's own process stays where it was first started.
    """
    wires = network if isinstance(network, Network) else Network() if network else None
    before = os.environ.get("SPARK_LOCAL_IP")
    try:
        cluster = Standalone(folder, wires, daemons or {}, memory)
        try:
            cluster.begin()
            os.environ["SPARK_LOCAL_IP"] = cluster.address  # for the driver, which this process starts
            for _ in range(workers):
                cluster.add()
            yield cluster
        finally:
            cluster.close()
    finally:
        os.environ.pop("SPARK_LOCAL_IP", None)
        if before is not None:
            os.environ["SPARK_LOCAL_IP"] = before
        if wires is not None and wires is not network:
            wires.close()


def wait_for(found: Callable[[], T], what: str) -> T:
    """Waits until something is there."""
    deadline = time.monotonic() + _WAIT_S
    while not (value := found()):
        if time.monotonic() > deadline:
            raise TimeoutError(what)
        time.sleep(0.05)
    return value
