"""Hosts on one machine: network namespaces, joined by a bridge, with wires that are as slow as asked and can be cut.

Rules
-----
- A namespace is held by a process of ours, which ends with the process that made it. So nothing is left behind,
  whatever ends that one, and namespaces have no names that others could meet.
- Addresses are of 198.18.0.0/24, which is set aside for benchmarks, inside these namespaces only. Nothing leads from
  there to anywhere else: the bridge is in a namespace of its own, which has no other link.
- A cut drops what either of two hosts sends the other, silently: nobody is told that a connection is gone. Each has
  an address for the other on the link that nobody listens to. Whoever else they talk to is not touched.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
_NETWORK = 0x40000000  # CLONE_NEWNET
_NOBODY = "02:00:00:00:00:fe"
_LIBC = ctypes.CDLL(None, use_errno=True)


class NoNamespaces(RuntimeError):
    """Namespaces cannot be made here; the text says why."""


def die_with_parent() -> None:
    """Has this process, a child that is about to run something else, end with the thread that started it."""
    _LIBC.prctl(_DEATH_SIGNAL, signal.SIGKILL)


def why_not() -> str:
    """Why namespaces cannot be made here; empty if they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [tool for tool in ("ip", "tc", "nsenter", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"network namespaces need {' and '.join(missing)}"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "name", "probe", "type", "bridge"], capture_output=True
    )
    return "" if tried.returncode == 0 else f"network namespaces cannot be made: {tried.stderr.decode().strip()}"


class Network:
    """Hosts by name, each with an address. `rate` is that of every wire, as `tc` writes it."""

    def __init__(self, rate: str = "1gbit") -> None:
        if reason := why_not():
            raise NoNamespaces(reason)
        self._rate = rate
        self._holders: dict[str, subprocess.Popen[bytes]] = {}
        self._cuts: set[frozenset[str]] = set()
        self.addresses: dict[str, str] = {}
        self._before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        self._hold("")
        self._ip("", "link", "add", "name", "bridge", "type", "bridge")
        self._ip("", "link", "set", "dev", "bridge", "up")

    def _hold(self, name: str) -> None:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], preexec_fn=die_with_parent)
        self._holders[name] = holder
        outside = os.readlink("/proc/thread-self/ns/net")
        while os.readlink(f"/proc/{holder.pid}/ns/net") == outside:  # it has not come to that yet
            if holder.poll() is not None:
                raise NoNamespaces("a network namespace could not be made")
            os.sched_yield()

    def inside(self, name: str) -> list[str]:
        """What to put before a command so that it runs on a host."""
        return ["nsenter", f"--net=/proc/{self._holders[name].pid}/ns/net"]

    def _ip(self, name: str, *words: str, tool: str = "ip") -> None:
        subprocess.run([*self.inside(name), tool, *words], check=True, capture_output=True)

    def add(self, name: str) -> str:
        """A new host; its address."""
        number = len(self.addresses) + 1
        wire, address = f"wire{number}", f"198.18.0.{number}"
        self._hold(name)
        self._ip(name, "link", "set", "lo", "up")
        peer = ("peer", "name", "eth0", "netns", str(self._holders[name].pid))
        self._ip("", "link", "add", "name", wire, "type", "veth", *peer)
        self._ip("", "link", "set", "dev", wire, "master", "bridge", "up")
        self._ip(name, "address", "add", f"{address}/24", "dev", "eth0")
        self._ip(name, "link", "set", "eth0", "up")
        shape = ("root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "100ms")
        self._ip(name, "qdisc", "add", "dev", "eth0", *shape, tool="tc")
        self._ip("", "qdisc", "add", "dev", wire, *shape, tool="tc")
        self.addresses[name] = address
        return address

    def cut(self, one: str, other: str) -> None:
        """Lets nothing through between two hosts."""
        for here, there in ((one, other), (other, one)):
            entry = (self.addresses[there], "lladdr", _NOBODY, "dev", "eth0", "nud", "permanent")
            self._ip(here, "neigh", "replace", *entry)
        self._cuts.add(frozenset((one, other)))

    def heal(self, one: str, other: str) -> None:
        """Lets everything through again."""
        for here, there in ((one, other), (other, one)):
            self._ip(here, "neigh", "del", self.addresses[there], "dev", "eth0")
        self._cuts.discard(frozenset((one, other)))

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing gets through."""
        return frozenset((one, other)) in self._cuts

    def enter(self, name: str) -> None:
        """Moves this thread, and what it starts from now on, to a host. To be called before anything is connected."""
        _move(os.open(f"/proc/{self._holders[name].pid}/ns/net", os.O_RDONLY))

    def close(self) -> None:
        """Takes everything down; this thread is where it was."""
        if self._before >= 0:
            _move(self._before)
            self._before = -1
        for holder in self._holders.values():
            holder.kill()
            holder.wait()
        self._holders.clear()


def _move(descriptor: int) -> None:
    try:
        if _LIBC.setns(descriptor, _NETWORK) != 0:
            raise OSError(ctypes.get_errno(), "a network namespace could not be entered")
    finally:
        os.close(descriptor)


def children_of(process: int) -> list[int]:
    """The processes that a process has started and that are there now."""
    return [number for number, parent in _parents().items() if parent == process]


def _parents() -> dict[int, int]:
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except (OSError, IndexError):
            continue
        if fields[0] != "Z":
            found[int(path.parent.name)] = int(fields[1])
    return found


def command(prefix: Sequence[str], words: Sequence[str], log: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    """A process that ends with this thread and writes to a file."""
    with log.open("wb") as out:
        return subprocess.Popen(
            [*prefix, *words], stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, preexec_fn=die_with_parent
        )
