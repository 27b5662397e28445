"""Observations are made behind a fence, by construction: who may import what makes them, and how it is called."""

from __future__ import annotations

import ast
from pathlib import Path

import millstream

ROOT = Path(millstream.__file__).parent
OBSERVING = {
    "millstream.engine.sample": {"sample_of", "worth_keeping"},
    "millstream.engine.spending": {"loads_of", "sources_of", "arrived"},
    "millstream.engine.adapting": {"busy_of"},
    "millstream.engine.observing": {"loads_together"},
}
"""What makes observations of an epoch, by module."""


def unfenced(tree: ast.Module, names: set[str]) -> list[str]:
    """Calls of these names that stand in no argument of a fence."""
    fenced = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "fence"
        for argument in node.args
        for inner in ast.walk(argument)
    }
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) in names]
    return [ast.unparse(node) for node in calls if id(node) not in fenced]


def test_observations_are_made_behind_a_fence() -> None:
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text())
        names = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module in OBSERVING
            for alias in node.names
            if alias.name in OBSERVING[node.module]
        }
        found[path.relative_to(ROOT).as_posix()] = unfenced(tree, names)
    found["engine/driver.py"] = []  # see below
    assert {path: calls for path, calls in found.items() if calls} == {}


def test_the_driver_makes_the_load_of_workers_in_one_fenced_method() -> None:
    tree = ast.parse((ROOT / "engine" / "driver.py").read_text())
    names = {name for names in OBSERVING.values() for name in names}
    methods = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == "_adapt"]
    inside = {ast.unparse(node) for method in methods for node in ast.walk(method) if isinstance(node, ast.Call)}
    assert [call for call in unfenced(tree, names) if call not in inside] == []
    assert unfenced(tree, {"self._adapt"}) == []


def test_a_call_outside_a_fence_is_found() -> None:
    tree = ast.parse("a = sample_of(records)\nb = self.fence('a sample', b'', lambda: sample_of(records))")
    assert unfenced(tree, {"sample_of"}) == ["sample_of(records)"]
