"""Code as it is in this process, in another process that has an older version of it, or none."""

from __future__ import annotations

import importlib
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark import cloudpickle

import millstream as ms
from millstream.engine.bundles import packed
from millstream.engine.by_value import by_value
from millstream.engine.shipping import load, package_of
from millstream.store.code import put_code
from millstream.store.objects import open_store
from millstream.testing import Simulated

Written = Callable[..., ModuleType]


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Written]:
    """Writes modules, and imports or reloads all of them; the last one."""
    folder = tmp_path / "own"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # two versions may have the same size and time
    before = set(sys.modules)

    def write(**sources: str) -> ModuleType:
        for name, text in sources.items():
            (folder / f"{name}.py").write_text(text)
        importlib.invalidate_caches()
        for name in sources:
            found = importlib.reload(sys.modules[name]) if name in sys.modules else importlib.import_module(name)
        return found

    yield write
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(folder)):
            del sys.modules[name]


def elsewhere(data: bytes, call: str = "value()", folder: Path | None = None) -> str:
    """What a call gives in another process, which may have modules of its own."""
    program = f"import pickle, sys\nvalue = pickle.loads(sys.stdin.buffer.read())\nprint({call})"
    path = [*([str(folder)] if folder else []), os.environ.get("PYTHONPATH", "")]
    ended = subprocess.run(
        [sys.executable, "-c", program],
        input=data,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        cwd="/",
        capture_output=True,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode().strip()


def registry() -> set[str]:
    return set(cloudpickle.list_registry_pickle_by_value())


def test_an_edited_and_reloaded_module_is_what_runs(written: Written, tmp_path: Path) -> None:
    stale = tmp_path / "stale"
    stale.mkdir()
    for name in ("own_rules", "own_count"):
        (stale / f"{name}.py").write_text("raise Exception('the worker must not import this')")
    count = """
from own_rules import rule
import own_rules
import millstream as ms

FACTOR = {}

class Base(ms.Computation):
    def on_record(self, row, at): ...

class Count(Base):
    def __init__(self, start=0): self.start = start
    def __call__(self): return self.start, rule(), own_rules.rule(), FACTOR, type(self).__name__
"""
    module = written(own_rules="def rule(): return 'first'", own_count=count.format(1))
    assert elsewhere(by_value(module.Count(5), cloudpickle), folder=stale) == "(5, 'first', 'first', 1, 'Count')"
    module = written(own_rules="def rule(): return 'second'", own_count=count.format(2))
    assert elsewhere(by_value(module.Count(6), cloudpickle), folder=stale) == "(6, 'second', 'second', 2, 'Count')"
    assert elsewhere(by_value(module.Count, cloudpickle), "value(7)()", stale) == "(7, 'second', 'second', 2, 'Count')"


def test_a_process_that_has_run_the_old_version_runs_the_new_one(written: Written) -> None:
    source = "class Count:\n    def __call__(self): return {}"
    packs = [by_value(written(own_again=source.format(n)).Count(), cloudpickle) for n in (1, 2, 1)]
    program = "[pickle.loads(p)() for p in value]"
    assert elsewhere(pickle.dumps(packs), program) == "[1, 2, 1]"


def test_modules_that_import_each_other_travel(written: Written) -> None:
    written(own_a="", own_b="import own_a\nx = 'b'\ndef f(): return own_a.x")
    module = written(own_a="import own_b\nx = 'a'\ndef f(): return own_b.f() + own_b.x + own_b.own_a.own_b.x")
    assert elsewhere(by_value(module.f, cloudpickle)) == "abb"
    same = "value.__globals__['own_b'].own_a.own_b is value.__globals__['own_b']"
    assert elsewhere(by_value(module.f, cloudpickle), same) == "True"


def test_what_of_a_module_cannot_travel_stays_behind_and_says_so(written: Written) -> None:
    written(
        own_rules="import threading\nlock = threading.Lock()\ndef locked():\n    with lock: ...\ndef rule(): return 7"
    )
    module = written(own_main="import own_rules\ndef f(): return own_rules.rule()\ndef g(): return own_rules.lock")
    assert elsewhere(by_value(module.f, cloudpickle)) == "7"
    g = pickle.loads(by_value(module.g, cloudpickle))
    with pytest.raises(AttributeError, match="own_rules.lock could not be sent to workers .*lock.*setup"):
        g()
    with pytest.raises(AttributeError, match="module 'own_rules' has no attribute 'other'"):
        _ = g.__globals__["own_rules"].other


def test_what_is_used_and_cannot_travel_is_an_error_and_the_registry_is_restored(written: Written) -> None:
    module = written(own_lock="import threading\nlock = threading.Lock()\ndef f(): return lock")
    cloudpickle.register_pickle_by_value(module)
    try:
        before = registry()
        with pytest.raises(TypeError, match="lock"):
            by_value(module.f, cloudpickle)
        assert registry() == before == {"own_lock"}
    finally:
        cloudpickle.unregister_pickle_by_value(module)
    with pytest.raises(TypeError, match="lock"):
        by_value(module.f, cloudpickle)
    assert registry() == set()


def test_what_is_installed_or_millstreams_own_travels_by_reference(written: Written) -> None:
    source = (
        "import json, numpy, millstream as ms\ndef f(): return json, numpy, ms, ms.Dedupe, json.JSONEncoder, numpy.mean"
    )
    found = pickle.loads(by_value(written(own_main=source).f, cloudpickle))()
    assert found[:3] == (sys.modules["json"], sys.modules["numpy"], ms)
    assert found[3] is ms.Dedupe
    assert registry() == set()


def test_code_of_a_bundle_travels_by_reference(written: Written) -> None:
    store = open_store("memory://")
    sha = put_code(store, packed({"main.py": b"class Count: ...\nmake = Count"}))
    count = load(store, sha, "main:make")
    data = by_value(count(), cloudpickle)
    assert package_of(sha).encode() in data
    assert type(pickle.loads(data)) is count


def test_a_computation_that_was_sent_by_value_counts(written: Written) -> None:
    source = """
import millstream as ms

def plus(x): return x + STEP

STEP = 3

class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row, at):
        self.total.set(plus(self.total.get()))
        yield at.key, self.total.get()
"""
    found: Any = pickle.loads(by_value(written(own_count=source).Count(), cloudpickle))
    query = ms.Query("words")
    query.source("words", None).key_by("word").compute("count", found).sink("out", ms.Memory())
    sim = Simulated(query, {"words": "word string"})
    sim.feed(words=[("mill",), ("mill",)])
    assert sim.outputs("out") == [("mill", 3), ("mill", 6)]
