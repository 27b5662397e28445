"""`with running.modify() as change:`: a change of the graph that takes effect in one epoch, or not at all.

Rules
-----
- Leaving the block checks the whole change, sends it as one command, and waits until it is committed. A raise inside
  the block sends nothing. What is wrong is raised before anything is sent, as far as it can be seen here.
- `preview` does all the checking and sends nothing.
- What came of it is an outcome like that of any command: a modification that was aborted or rolled back is raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from millstream.control.handle import Handle
from millstream.engine.bundles import Bundle, bundle
from millstream.engine.version import Version
from millstream.errors import UserError
from millstream.model.change import Calls, Change, Shipped
from millstream.model.query import Query
from millstream.model.rewrite import Rewrite, rewritten
from millstream.model.transfers import transfers


@dataclass(frozen=True, slots=True)
class Preview:
    """What a change would do. Made by `Modify.preview`; prints."""

    before: str
    """The graph that runs, as `Query.explain` tells it."""
    after: str
    """The graph as it would be; empty if it would not be good."""
    changes: tuple[str, ...]
    """What is inserted, replaced, removed and renamed."""
    state: tuple[str, ...]
    """What becomes of stored state."""
    trouble: str = ""
    """Why it would be refused; empty if it would not."""

    def __str__(self) -> str:
        lines = [*self.changes, *(f"  {line}" for line in self.state)]
        if self.trouble:
            return "\n".join([*lines, f"It would be refused: {self.trouble}"])
        return "\n".join([*lines, "", "Before:", _indented(self.before), "After:", _indented(self.after)])


class Block:
    """A `with` block that sends what was asked for in it when it ends, unless something was raised."""

    def __init__(self, wait: bool, timeout: float | None) -> None:
        self._wait, self._timeout = wait, timeout
        self._handle: Handle | None = None

    @property
    def handle(self) -> Handle:
        """What becomes of the change; there once the block has ended."""
        if self._handle is None:
            raise UserError("the change has not been sent: it is when its block ends")
        return self._handle

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            return
        self._handle = self._sent_off()
        if self._wait:
            self._handle.wait(self._timeout)

    def _sent_off(self) -> Handle:
        raise NotImplementedError


class Modify(Block, Change):
    """A change of a running query, made by `RunningQuery.modify`. It takes effect when its block ends.

    The methods are those of a change: `insert`, `replace`, `remove`, `rename`, `source`, `sink`, `shadow` and
    `cut_over`, and `stream` for anything else.
    """

    def __init__(
        self,
        version: Version,
        build: Callable[[Query], Version],
        send: Callable[[Rewrite, str], Handle],
        wait: bool,
        timeout: float | None,
    ) -> None:
        Change.__init__(self, version.query)
        Block.__init__(self, wait, timeout)
        self._graph, self._build, self._send = version.graph, build, send

    def _sent_off(self) -> Handle:
        rewrite = self.rewrite
        if rewrite.empty:
            raise UserError("the change changes nothing: insert, replace, remove or rename something")
        self._checked(rewrite)
        return self._send(rewrite, "; ".join(summary(self._before, rewrite)))

    def preview(self) -> Preview:
        """What the change would do, and whether it would be refused. Nothing is sent."""
        rewrite = self.rewrite
        changes = tuple(summary(self._before, rewrite))
        try:
            after, lines = self._checked(rewrite)
        except UserError as error:
            return Preview(self._before.explain(), "", changes, (), str(error))
        return Preview(self._before.explain(), after.explain(), changes, tuple(lines))

    def _checked(self, rewrite: Rewrite) -> tuple[Query, list[str]]:
        """The query as it would be, and what becomes of its state; raises what is wrong."""
        after = rewritten(self._before, rewrite)
        moved = transfers(self._graph, self._build(after).graph, rewrite)
        return after, moved.lines()


_SAID = {"source": "insert source", "sink": "insert sink", "cut_over": "cut over"}


class Asking(Block):
    """A change of a query that runs elsewhere, made by `Control.modify`. It takes effect when its block ends.

    Only its driver has the query, so the calls travel there, and what is wrong with them is raised when it has looked.
    """

    def __init__(
        self,
        send: Callable[[Calls, str, bool, Iterable[Bundle]], Handle],
        wait: bool = True,
        timeout: float | None = None,
    ) -> None:
        super().__init__(wait, timeout)
        self._ask = send
        self._bundles: dict[str, Bundle] = {}
        self._calls: list[tuple[str, dict[str, Any]]] = []

    def source(self, name: str, frame: Any, **options: Any) -> None:
        """As `Modify.source`; what it adds is known by its name."""
        self._add("source", name=name, frame=frame, **options)

    def insert(self, name: str, computation: Any = None, **arguments: Any) -> None:
        """As `Modify.insert`."""
        self._add("insert", name=name, computation=computation, **arguments)

    def sink(self, name: str, sink: Any, *, after: str) -> None:
        """As `Modify.sink`."""
        self._add("sink", name=name, sink=sink, after=after)

    def replace(self, name: str, computation: Any = None, **arguments: Any) -> None:
        """As `Modify.replace`."""
        self._add("replace", name=name, computation=computation, **arguments)

    def remove(self, name: str, *, reconnect: bool = False, cut: bool = False) -> None:
        """As `Modify.remove`."""
        self._add("remove", name=name, reconnect=reconnect, cut=cut)

    def rename(self, old: str, new: str) -> None:
        """As `Modify.rename`."""
        self._add("rename", old=old, new=new)

    def shadow(self, name: str, computation: Any = None, **arguments: Any) -> None:
        """As `Modify.shadow`."""
        self._add("shadow", name=name, computation=computation, **arguments)

    def cut_over(self, name: str) -> None:
        """As `Modify.cut_over`."""
        self._add("cut_over", name=name)

    def code(self, target: str) -> Shipped:
        """Code that is not imported here, for a change to bring: `module:Name`, `path/to/file.py:Name` or
        `path/to/dist.whl:package.module:Name`. What it gives stands for a computation or function."""
        made = bundle(target)
        self._bundles[made.sha] = made
        return Shipped(made.sha, made.entry)

    def _add(self, verb: str, **arguments: Any) -> None:
        inspect.signature(getattr(Change, verb)).bind(None, **arguments)
        self._calls.append((verb, arguments))

    def _sent_off(self) -> Handle:
        return self.send()

    def __str__(self) -> str:
        """What is asked for, in words."""
        return "; ".join(
            f"rename {given['old']} to {given['new']}"
            if verb == "rename"
            else f"{_SAID.get(verb, verb)} {given['name']}"
            for verb, given in self._calls
        )

    def preview(self, timeout: float | None = None) -> str:
        """What the driver says the change would do; raises why it would be refused. Nothing changes."""
        return self.send(trial=True).wait(timeout).text

    def send(self, *, trial: bool = False) -> Handle:
        """Sends what has been asked for so far, without waiting. A trial is checked and prepared, and that is all."""
        if not self._calls:
            raise UserError("the change changes nothing: insert, replace, remove or rename something")
        return self._ask(Calls(tuple(self._calls)), str(self), trial, self._bundles.values())


def summary(before: Query, rewrite: Rewrite) -> list[str]:
    """What a rewrite does, a line for each thing that it touches."""
    lines = [f"rename {old} to {new}" for old, new in rewrite.renamed.items()]
    new_names, old_names = set(rewrite.renamed.values()), set(rewrite.renamed)
    for kind in ("sources", "steps", "maps", "sinks", "feedbacks"):
        known, one = getattr(before, kind), kind[:-1]
        for name in rewrite.put.get(kind, {}):
            if name in rewrite.states:
                lines.append(f"replace {one} {name}")
            elif name not in known and name not in new_names:
                lines.append(f"insert {one} {name}")
            elif name in known:
                verb = "replace" if kind == "maps" and _other_code(before, rewrite, name) else "rewire"
                lines.append(f"{verb} {one} {name}")
        lines += [f"remove {one} {name}" for name in rewrite.taken.get(kind, ()) if name not in old_names]
    return lines


def _other_code(before: Query, rewrite: Rewrite, name: str) -> bool:
    return before.maps[name].fn is not rewrite.put["maps"][name].fn


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
