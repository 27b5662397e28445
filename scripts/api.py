"""Writes docs/api.md, the reference of every public name, from docstrings: python scripts/api.py

Rules
-----
- Every name in `millstream.__all__` and `millstream.testing.__all__` is on the page, once. A module that `SECTIONS`
  does not know gets a section of its own, so a new name is never missing.
- The page depends on the code alone: not on the machine, the version of Python, or the order of a set.
- A class shows what it has of its own and from bases that are not public. What it has from a public one is said there,
  also what it overrides without a word.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, get_overloads

import millstream
import millstream.testing

PAGE = Path(__file__).resolve().parents[1] / "docs" / "api.md"
WIDTH = 100

SECTIONS = {
    "Queries and streams": ["control.start", "model.query"],
    "Computations": ["model.computation", "model.batch"],
    "State": ["model.state", "model.maps", "model.bags"],
    "Timers and holds": ["model.timers", "model.times", "model.holds"],
    "The library of steps": ["library.windows", "library.windowed", "library.aggregates", "library"],
    "Sinks": ["model.sinks"],
    "Migration": [
        "protocol.migration",
        "protocol.strategies",
        "protocol.planner",
        "control.handle",
        "protocol.steering",
    ],
    "Modification": ["control.modify", "model.carry", "protocol.conditions"],
    "Running queries": ["spark.session", "control.running", "control.connect", "control.overview"],
    "Errors": ["errors"],
}
"""The order of the page: what users write, what they run, what goes wrong; for each section, modules or whole packages.
Others come before `LAST`."""

LAST = ["Running queries", "Errors"]

MADE = {
    *(
        "At",
        "Batch",
        "Control",
        "Handle",
        "InputBatch",
        "KeyedStream",
        "MigrationPlan",
        "Modify",
        "Outcome",
        "Overview",
    ),
    *(
        "Decided",
        "Decision",
        "Progress",
        "ReplicaFacts",
        "RunningQuery",
        "Status",
        "Stream",
        "TimerBatch",
        "WindowedStream",
    ),
}
"""Classes that users are given and never make, so that their constructors are nobody's business."""

GIVEN = [
    ("library.windowed", "WindowedStream"),
    ("protocol.migration", "MigrationPlan"),
    ("control.handle", "Progress"),
    ("protocol.steering", "Outcome"),
    ("control.overview", "Overview"),
]
"""Classes without a public name that methods of public ones return."""

INTERNAL = {
    *("arrow_type", "encode", "fresh_default", "numpy_type", "payload_text", "stored_text", "stored_type", "type_text"),
    *("subkey_column", "subkey_text", "subkey_type", "Hold.timer"),
    *("InputBatch.micros", "InputBatch.rows_count", "Simulated.deliver"),
    *(f"{strategy}.rounds" for strategy in ("AllAtOnce", "Fluid", "Batched", "Matched")),
    *("MigrationPlan.after", "Outcome.drains", "Outcome.generation"),
    *(f"FaultyStore.{operation}" for operation in ("create", "put", "get", "get_ranges", "list", "delete", "path")),
}
"""Members without an underscore that one layer calls on another, and users do not."""

ALIASES = {
    "Rows": "NDArray[int64]",
    "Times": "NDArray[int64]",
    "Mask": "NDArray[bool]",
    "Steps": "str | Sequence[str] | None",
    "Span": "tuple[int, int]",
    "When": "int | datetime | tuple[Literal['event'], datetime] | None",
}
"""Names for types that are short in the code and mean nothing to a reader."""


@dataclass(frozen=True, slots=True)
class Member:
    """A method, or something that is read: `signatures` of the one, the type of the other."""

    name: str
    doc: str
    signatures: tuple[str, ...] = ()
    type: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """A public name."""

    name: str
    module: str
    doc: str
    signatures: tuple[str, ...]
    bases: tuple[str, ...] = ()
    members: tuple[Member, ...] = ()


def entries(package: ModuleType) -> list[Entry]:
    """The public names of a package, module by module, in the order in which these define them."""
    homes = _homes(package)
    public = {id(getattr(package, name)) for name in package.__all__}
    found = [_entry(name, getattr(package, name), homes[name], public) for name in package.__all__]
    return sorted(found, key=lambda entry: (entry.module, _line_of(entry)))


def _homes(package: ModuleType) -> dict[str, str]:
    """The module that each name is imported from: constants do not know theirs."""
    tree = ast.parse(inspect.getsource(package))
    imports = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.module]
    return {alias.asname or alias.name: str(node.module) for node in imports for alias in node.names}


def _entry(name: str, thing: Any, module: str, public: set[int]) -> Entry:
    if inspect.isclass(thing):
        made = () if name in MADE or issubclass(thing, BaseException) else (_signature(name, thing),)
        bases = tuple(base.__name__ for base in thing.__mro__[1:] if id(base) in public)[:1]
        return Entry(name, module, inspect.getdoc(thing) or "", made, bases, tuple(_members(thing, public)))
    if callable(thing):
        return Entry(name, module, inspect.getdoc(thing) or "", _signatures(name, thing))
    return Entry(name, module, _documented(ast.parse(_source(module)).body).get(name, ("", ""))[1], ())


def _source(module: str) -> str:
    return inspect.getsource(sys.modules[module])


def _line_of(entry: Entry) -> int:
    found = re.search(rf"^(class |def )?{entry.name}\b", _source(entry.module), re.MULTILINE)
    return found.start() if found else 0


def _members(kind: type, public: set[int]) -> Iterator[Member]:
    bases = [base for base in kind.__mro__ if base.__module__.startswith("millstream")]
    mine = [base for base in reversed(bases) if base is kind or id(base) not in public]
    said = {name for base in bases[1:] if id(base) in public for name in vars(base)}
    found: dict[str, Member] = {}
    for base in mine:
        tree = ast.parse(textwrap.dedent(inspect.getsource(base))).body[0]
        assert isinstance(tree, ast.ClassDef)
        starts = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
        for body in (tree.body, *(node.body for node in starts)):
            found |= {name: Member(name, doc, (), text) for name, (text, doc) in _documented(body).items()}
        for name, member in vars(base).items():
            made = _member(name, member)
            if made is not None and (member.__doc__ or name not in said):
                found[name] = made
    for name, made in found.items():
        if not name.startswith("_") and not {name, f"{kind.__name__}.{name}"} & INTERNAL:
            yield made


def _member(name: str, member: Any) -> Member | None:
    if isinstance(member, (property, cached_property)):
        getter = member.fget if isinstance(member, property) else member.func
        returned = _annotation(getattr(getter, "__annotations__", {}).get("return", ""))
        return Member(name, inspect.getdoc(member) or "", (), returned)
    if inspect.isfunction(member):
        return Member(name, inspect.getdoc(member) or "", _signatures(name, member))
    return None


def _documented(body: list[ast.stmt]) -> dict[str, tuple[str, str]]:
    """Names that are assigned to and have a text below them: their types, if they are declared, and the texts."""
    found = {}
    for node, below in pairwise(body):
        if not (isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        name = target.attr if isinstance(target, ast.Attribute) else getattr(target, "id", "")
        kind = _annotation(ast.unparse(node.annotation)) if isinstance(node, ast.AnnAssign) else ""
        if name:
            found[name] = (kind, inspect.cleandoc(str(below.value.value)))
    return found


def _signatures(name: str, function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(_signature(name, each) for each in get_overloads(function) or [function])


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    shown: list[str] = []
    star = False
    for parameter in signature.parameters.values():
        if parameter.name == "self" or repr(parameter.default) == "<factory>":
            continue
        if parameter.kind == parameter.KEYWORD_ONLY and not star:
            shown.append("*")
        star |= parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_POSITIONAL)
        shown.append(_parameter(parameter))
    positional = [p for p in signature.parameters.values() if p.kind == p.POSITIONAL_ONLY and p.name != "self"]
    if positional:
        shown.insert(len(positional), "/")
    unknown = signature.return_annotation in (signature.empty, None) or inspect.isclass(function)
    returned = "" if unknown else f" -> {_annotation(signature.return_annotation)}"
    line = f"{name}({', '.join(shown)}){returned}"
    return line if len(line) <= WIDTH else f"{name}(\n    " + ",\n    ".join(shown) + f",\n){returned}"


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{typed}"
    default = repr(parameter.default).replace("datetime.", "").replace("timezone.utc", "UTC")
    return f"{parameter.name}{typed} = {'...' if default.startswith('<') else default}"


def _annotation(given: Any) -> str:
    text = given if isinstance(given, str) else getattr(given, "__name__", str(given))
    for name, meaning in ALIASES.items():
        text = re.sub(rf"\b{name}\b", meaning, text)
    return re.sub(r"ClassVar\[(.*)\]$", r"\1", text.replace("npt.", "").replace("np.", ""))


# -- the page ---------------------------------------------------------------------------------------------------


def page() -> str:
    """The whole page."""
    found = entries(millstream)
    for home, name in GIVEN:
        found.append(_entry(name, getattr(import_module(f"millstream.{home}"), name), f"millstream.{home}", set()))
    grouped: dict[str, list[Entry]] = {title: [] for title in SECTIONS if title not in LAST}
    for entry in sorted(found, key=lambda entry: _place(entry.module)):
        grouped.setdefault(_place(entry.module)[1], []).append(entry)
    for title in LAST:
        grouped[title] = grouped.pop(title, [])
    grouped["Testing"] = entries(millstream.testing)
    lines = [
        "# API reference",
        "",
        "Every public name of `millstream`, here called `ms`, and of `millstream.testing`, from their docstrings;",
        "`make docs` writes this page. How to use them is in the [tutorial](tutorial.md) and the [guide](guide.md).",
        "",
    ]
    for title, names in grouped.items():
        links = ", ".join(f"[`{entry.name}`](#{entry.name.lower()})" for entry in names)
        lines.append(f"- [{title}](#{title.lower().replace(' ', '-')}): {links}")
    for title, names in grouped.items():
        lines += ["", f"## {title}"]
        if title == "Testing":
            lines += ["", markdown(inspect.getdoc(millstream.testing) or "")]
        for entry in names:
            lines += ["", *_entry_lines(entry)]
    return "\n".join([*lines, ""])


def _place(module: str) -> tuple[int, str]:
    """Where a module comes on the page, and the title of its section."""
    listed = [(title, f"millstream.{each}") for title, modules in SECTIONS.items() for each in modules]
    for number, (title, each) in enumerate(listed):
        if module == each or module.startswith(f"{each}."):
            return number, title
    return len(listed), module.rpartition(".")[2].replace("_", " ").capitalize()


def _entry_lines(entry: Entry) -> Iterator[str]:
    yield f"### {entry.name}"
    if entry.signatures:
        yield from ("", _code(entry.signatures))
    yield from ("", markdown(entry.doc))
    if entry.bases:
        yield from ("", f"Derives from [`{entry.bases[0]}`](#{entry.bases[0].lower()}).")
    read = [member for member in entry.members if not member.signatures]
    if read:
        yield ""
    for member in read:
        typed = f": {member.type}" if member.type else ""
        text = textwrap.indent(markdown(member.doc), "  ").strip()
        yield f"- `{member.name}{typed}`" + (f"  \n  {text}" if text else "")
    for member in entry.members:
        if member.signatures:
            yield from ("", f"#### {entry.name}.{member.name}", "", _code(member.signatures))
            yield from ("", markdown(member.doc))


def _code(signatures: tuple[str, ...]) -> str:
    return "\n".join(["```python", *signatures, "```"])


def markdown(doc: str) -> str:
    """A docstring with its examples as blocks of code."""
    blocks = []
    for block in doc.split("\n\n"):
        example = block.lstrip().startswith(">>>")
        blocks.append(f"```pycon\n{block}\n```" if example else block)
    return "\n\n".join(blocks).strip()


if __name__ == "__main__":
    PAGE.write_text(page())
