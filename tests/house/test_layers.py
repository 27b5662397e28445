"""The layering is a test, not a wish: who may import whom, and who may touch Spark."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import millstream

ROOT = Path(millstream.__file__).parent
ALLOWED = {
    "errors": set(),
    "model": {"errors"},
    "library": {"errors", "model"},
    "protocol": {"errors"},
    "store": {"errors", "protocol"},
    "engine": {"errors", "model", "protocol", "store"},
    "testing": {"errors", "model", "protocol", "store", "engine"},
    "spark": {"errors", "model", "protocol", "store", "engine"},
    "nexmark": {"errors"},  # and the public names: it is written as a user writes
    "control": {"errors", "model", "library", "protocol", "store", "engine", "spark", "nexmark"},
}
MODULES = sorted(path.relative_to(ROOT) for path in ROOT.rglob("*.py") if path.parent != ROOT or path.stem == "errors")


def imports_of(path: Path) -> set[str]:
    """What a module imports when it runs; what it imports for type checkers only is no dependency."""
    names = set()
    tree = ast.parse((ROOT / path).read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, "no relative imports"
            names.add(node.module)
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_imports_only_the_layers_below_it(path: Path) -> None:
    layer = path.parts[0].removesuffix(".py")
    mine = {name.split(".")[1] for name in imports_of(path) if name.startswith("millstream.")}
    assert mine <= ALLOWED[layer] | {layer}


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_only_spark_and_what_sits_on_it_imports_pyspark(path: Path) -> None:
    uses = any(name.split(".")[0] in ("pyspark", "py4j") for name in imports_of(path))
    # What of NEXMark is a frame: the generator as Spark reads it, and what a Spark user would write for a batch.
    frames = {Path("nexmark/frames.py"), Path("nexmark/twins.py")}
    assert not uses or path.parts[0] in ("spark", "control") or path in frames


@pytest.mark.parametrize("path", [m for m in MODULES if m.parts[0] == "protocol"], ids=str)
def test_protocol_is_pure(path: Path) -> None:
    allowed = {"numpy", "millstream", "__future__", "collections", "dataclasses", "typing", "functools", "itertools"}
    allowed |= {"bisect", "builtins", "heapq", "operator"}
    assert {name.split(".")[0] for name in imports_of(path)} <= allowed


@pytest.mark.parametrize("path", MODULES, ids=str)
def test_a_module_is_named_after_its_subject(path: Path) -> None:
    assert path.stem not in {"utils", "util", "helpers", "common", "manager", "misc"}


@pytest.mark.parametrize("path", [m for m in MODULES if m.stem not in ("__init__", "errors")], ids=str)
def test_a_file_opens_with_what_it_is_for(path: Path) -> None:
    text = ast.get_docstring(ast.parse((ROOT / path).read_text())) or ""
    assert len(text) > 40
