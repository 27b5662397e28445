"""Bundles, here and in other processes: versions side by side, imports that stay inside, failures without a trace."""

from __future__ import annotations

import importlib
import inspect
import os
import pickle
import pkgutil
import subprocess
import sys
import threading
import traceback
import zipfile
from pathlib import Path
from typing import Any

import pytest
from pyspark import cloudpickle

import millstream as ms
from millstream.engine import shipping
from millstream.engine.bundles import bundle, packed
from millstream.engine.shipping import ensure, install, load, package_of
from millstream.errors import DamagedObject, UserError
from millstream.store.code import put_code, sha_of
from millstream.store.objects import ObjectStore, open_store
from millstream.testing import Simulated

COUNT = """
import millstream as ms
{imports}

class Count(ms.Computation):
    total = ms.Value("long", default=0)
    output = "word string, total long"

    def on_record(self, row, at):
        self.total.set(self.total.get() + {amount})
        yield at.key, self.total.get()
"""


@pytest.fixture
def store(tmp_path: Path) -> ObjectStore:
    return open_store(str(tmp_path / "store"))


def shipped(store: ObjectStore, files: dict[str, str]) -> str:
    return put_code(store, packed({name: text.encode() for name, text in files.items()}))


def run(computation: Any) -> list[Any]:
    query = ms.Query("words")
    query.source("words", None).key_by("word").compute("count", computation).sink("out", ms.Memory())
    sim = Simulated(query, {"words": "word string"})
    sim.feed(words=[("mill",), ("mill",)])
    return sim.outputs("out")


def modules(sha: str) -> set[str]:
    return {name for name in sys.modules if name.startswith(package_of(sha))}


def python(program: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )


# -- versions


def test_two_versions_of_a_module_live_side_by_side(store: ObjectStore, tmp_path: Path) -> None:
    source = tmp_path / "count.py"
    found = []
    for amount in (1, 10):
        source.write_text(COUNT.format(imports="", amount=amount))
        made = bundle(f"{source}:Count")
        found.append(load(store, put_code(store, made.data), made.entry))
    assert [run(each) for each in found] == [[("mill", 1), ("mill", 2)], [("mill", 10), ("mill", 20)]]
    assert len({each.__module__ for each in found}) == 2
    assert "count" not in sys.modules


def test_a_module_beside_it_that_changed_makes_another_version_of_all(store: ObjectStore) -> None:
    main = {"main.py": "import rules\nfrom rules import rule\ndef both(): return rules.rule(), rule()"}
    old = load(store, shipped(store, {**main, "rules.py": "def rule(): return 'old'"}), "main:both")
    new = load(store, shipped(store, {**main, "rules.py": "def rule(): return 'new'"}), "main:both")
    assert (old(), new()) == (("old", "old"), ("new", "new"))


def test_a_bundle_is_not_what_the_process_has_under_the_same_name(
    store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "rules_at_large.py").write_text("x = 'of the process'")
    monkeypatch.syspath_prepend(str(tmp_path))
    mine = importlib.import_module("rules_at_large")
    sha = shipped(
        store, {"main.py": "import rules_at_large as r\ndef f(): return r.x", "rules_at_large.py": "x = 'sent'"}
    )
    assert load(store, sha, "main:f")() == "sent"
    assert sys.modules["rules_at_large"] is mine
    assert mine.x == "of the process"


def test_what_is_asked_for_twice_is_imported_once(store: ObjectStore) -> None:
    sha = shipped(store, {"main.py": "class Count(dict): ..."})
    assert install(packed({"main.py": b"class Count(dict): ..."}), sha) == package_of(sha)
    first = load(store, sha, "main:Count")
    ensure(store, [sha, sha])
    assert load(store, sha, "main:Count") is first
    assert sys.meta_path.count(shipping._FINDER) == 1


def test_threads_get_the_same(store: ObjectStore) -> None:
    sha = shipped(
        store,
        {
            "main.py": "import time, slow\nfrom slow import made\ntime.sleep(0.01)\nclass Count(dict): ...",
            "slow.py": "import time\nmade = []\ntime.sleep(0.01)\nmade.append(1)\nimport main",
        },
    )
    found, start = [], threading.Barrier(8)

    def work() -> None:
        start.wait()
        found.append(load(store, sha, "main:Count"))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1


# -- imports


INSIDE = {
    "import helpers": "helpers.x",
    "import helpers as h": "h.x",
    "from helpers import x": "x",
    "from helpers import x as y": "y",
    "from helpers import *": "x",
    "import shop.rules": "(shop.rules.x, shop.name)[0]",
    "import shop.rules as r": "r.x",
    "import shop": "shop.rules.x",
    "from shop import rules": "rules.x",
    "from shop.rules import x": "x",
    "import os, helpers, shop.rules, json as j": "(os.path, helpers.x, j.dumps, shop.rules.x)[3]",
    "from lib.tools import x": "x",
    "import lib.tools": "lib.tools.x",
}
BESIDE = {
    "helpers.py": "x = 'inside'\nimport main",
    "shop/__init__.py": "name = __name__\nimport shop.rules\nfrom . import rules as again\nassert again is shop.rules",
    "shop/rules.py": "from .inner.deep import x\nfrom shop.inner import deep\nimport shop\nassert deep.x is x",
    "shop/inner/__init__.py": "",
    "shop/inner/deep.py": "from ...helpers import x\nfrom .. import name",
    "lib/tools.py": "from helpers import x",
}


@pytest.mark.parametrize(
    ("statement", "inside"),
    [(each, False) for each in INSIDE] + [(each, True) for each in INSIDE if "*" not in each],
)
def test_imports_of_a_bundle_stay_inside(store: ObjectStore, statement: str, inside: bool) -> None:
    value = INSIDE[statement]
    source = f"def f():\n    {statement}\n    return {value}" if inside else f"{statement}\ndef f(): return {value}"
    before = set(sys.modules)
    sha = shipped(store, {**BESIDE, "main.py": source})
    assert load(store, sha, "main:f")() == "inside"
    assert {name.split(".")[0] for name in set(sys.modules) - before} == {package_of(sha)}


def test_imports_inside_of_a_function_that_was_pickled_by_value_stay_inside(store: ObjectStore) -> None:
    source = "def make():\n    def f():\n        import helpers\n        return helpers.x\n    return f"
    sha = shipped(store, {"main.py": source, "helpers.py": "x = 'inside'"})
    assert pickle.loads(cloudpickle.dumps(load(store, sha, "main:make")()))() == "inside"


def test_imports_of_others_are_as_usual(store: ObjectStore) -> None:
    source = (
        "import json\nimport pyarrow.compute as pc\nfrom millstream.store import names\ndef f(): return json, pc, names"
    )
    found = load(store, shipped(store, {"main.py": source}), "main:f")()
    assert [module.__name__ for module in found] == ["json", "pyarrow.compute", "millstream.store.names"]
    assert found[0] is sys.modules["json"]


def test_a_wheel_is_imported_and_its_data_can_be_read(store: ObjectStore, tmp_path: Path) -> None:
    source = """
import importlib.resources, pkgutil
from shop import rules

def words():
    read = importlib.resources.files(__package__).joinpath("data/words.txt").read_text()
    assert pkgutil.get_data(__name__, "data/words.txt") == read.encode()
    return rules.upper(read)
"""
    with zipfile.ZipFile(tmp_path / "shop-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("shop/__init__.py", "")
        wheel.writestr("shop/words.py", source)
        wheel.writestr("shop/rules.py", "upper = str.upper")
        wheel.writestr("shop/data/words.txt", "the mill")
        wheel.writestr("shop-1.0.dist-info/RECORD", "")
    made = bundle(f"{tmp_path}/shop-1.0-py3-none-any.whl:shop.words:words")
    sha = put_code(store, made.data)
    assert load(store, sha, made.entry)() == "THE MILL"
    with pytest.raises(FileNotFoundError):
        pkgutil.get_data(f"{package_of(sha)}.shop", "data/none.txt")


def test_a_traceback_shows_the_lines_as_they_were_written(store: ObjectStore) -> None:
    source = "import helpers, shop.rules\n\ndef f():\n    x = 1\n    raise ValueError('here')  # the line\n"
    sha = shipped(store, {"main.py": source, "helpers.py": "", "shop/__init__.py": "", "shop/rules.py": ""})
    f = load(store, sha, "main:f")
    with pytest.raises(ValueError, match="here") as raised:
        f()
    shown = "".join(traceback.format_exception(raised.value))
    assert f"File \"{package_of(sha)}/main.py\", line 5, in f\n    raise ValueError('here')  # the line\n" in shown
    assert inspect.getsource(f) == source.partition("\n\n")[2]


# -- failures


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("def f(:", "SyntaxError.*main.py, line 1"),
        ("import nowhere_at_all", r"No module named 'nowhere_at_all' \(main.py, line 1\).*installed on the driver"),
        ("import helpers\n1 / 0", r"ZeroDivisionError: division by zero \(main.py, line 2\)"),
        ("import broken", r"RuntimeError: broken \(broken.py, line 2\)"),
        ("raise SystemExit(3)", "SystemExit: 3"),
        ("from helpers import y", "cannot import name 'y'"),
        ("import shop.nothing", "No module named .*shop.nothing"),
        ("g = 1", "the module 'main' of the code .* has no 'f'"),
        ("f = 'text'", "'main:f' of the code .* is a str, expected a Computation or a function"),
    ],
)
def test_code_that_cannot_be_used_says_why(store: ObjectStore, source: str, expected: str) -> None:
    beside = {
        "helpers.py": "x = 1",
        "broken.py": "import helpers\nraise RuntimeError('broken')",
        "shop/__init__.py": "",
    }
    sha = shipped(store, {"main.py": source, **beside})
    for _ in range(2):
        with pytest.raises(UserError, match=expected):
            load(store, sha, "main:f")


def test_a_module_that_is_not_in_the_bundle_is_told_with_those_that_are(store: ObjectStore) -> None:
    sha = shipped(store, {"main.py": "", "shop/new.py": ""})
    with pytest.raises(UserError, match="no module 'other'; it has main, shop, shop.new"):
        load(store, sha, "other:f")


def test_an_import_that_fails_leaves_nothing_behind(store: ObjectStore, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {
        "main.py": "import helpers, shop.rules\nimport missing_here\ndef f(): return helpers.main is me()\n"
        "def me():\n    import main\n    return main",
        "helpers.py": "import main",
        "shop/__init__.py": "from . import rules",
        "shop/rules.py": "import main",
        "fine.py": "def f(): return 1",
    }
    sha = shipped(store, files)
    fine = load(store, sha, "fine:f")
    package = package_of(sha)
    with pytest.raises(UserError, match="missing_here"):
        load(store, sha, "main:f")
    assert modules(sha) == {package, f"{package}.fine"}
    assert not {"helpers", "shop", "main"} & set(vars(sys.modules[package]))
    monkeypatch.setitem(sys.modules, "missing_here", sys)
    assert load(store, sha, "main:f")(), "all of them refer to the new module, and none to the one that failed"
    assert load(store, sha, "fine:f") is fine


def test_an_import_that_is_optional_may_fail(store: ObjectStore) -> None:
    files = {
        "main.py": "try:\n    import fast as way\nexcept ImportError:\n    import slow as way\ndef f(): return way.x",
        "fast.py": "import base, missing_here\nx = 'fast'",
        "slow.py": "import base\nx = base.x",
        "base.py": "x = 'slow'",
    }
    assert load(store, shipped(store, files), "main:f")() == "slow"


def test_code_with_another_hash_is_not_used(store: ObjectStore, tmp_path: Path) -> None:
    good, evil = packed({"main.py": b"def f(): ..."}), packed({"main.py": b"def g(): ..."})
    with pytest.raises(UserError, match=f"found code with SHA-256 {sha_of(evil)}, expected {sha_of(good)}"):
        install(evil, sha_of(good))
    assert not shipping.has_code(sha_of(good))
    sha = put_code(store, good)
    for data in (evil, good[:-10]):
        (tmp_path / "store" / "code" / sha).write_bytes(data)
        with pytest.raises(DamagedObject, match=f"code/{sha}"):
            load(store, sha, "main:f")
    (tmp_path / "store" / "code" / sha).write_bytes(good)
    assert callable(load(store, sha, "main:f"))


def test_two_hashes_that_begin_alike_are_not_mistaken_for_each_other() -> None:
    data = packed({"main.py": b"# first of two"})
    install(data, sha_of(data))
    with pytest.raises(UserError, match="under the same name"):
        ensure(open_store("memory://"), [sha_of(data)[:16] + "0" * 48])


def test_what_is_no_archive_is_refused() -> None:
    with pytest.raises(UserError, match="no bundle of code: found 4 bytes"):
        install(b"text", sha_of(b"text"))


# -- other processes


WORKER = """
import pickle, sys
from millstream.engine.shipping import ensure
from millstream.store.objects import open_store

store = open_store(sys.argv[1])
for line in sys.stdin:
    sha, data = line.split()
    ensure(store, [sha])
    print(pickle.loads(bytes.fromhex(data)).rule(), flush=True)
"""


def test_a_process_that_is_used_again_runs_the_new_version(store: ObjectStore, tmp_path: Path) -> None:
    source, rules = tmp_path / "main.py", tmp_path / "rules.py"
    source.write_text("import rules\nclass Count:\n    def rule(self): return rules.x, self.y\n\nmake = Count")
    worker = subprocess.Popen(
        [sys.executable, "-c", WORKER, store.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    )
    assert worker.stdin is not None
    assert worker.stdout is not None
    try:
        for version, dumps in enumerate([pickle.dumps, cloudpickle.dumps, pickle.dumps]):
            rules.write_text(f"x = 'version {version}'")
            made = bundle(f"{source}:make")
            sha = put_code(store, made.data)
            value = load(store, sha, made.entry)()
            value.y = version
            worker.stdin.write(f"{sha} {dumps(value).hex()}\n")
            worker.stdin.flush()
            assert worker.stdout.readline() == f"('version {version}', {version})\n"
    finally:
        worker.stdin.close()
        worker.stdout.close()
        assert worker.wait(timeout=60) == 0


def test_without_the_bundle_nothing_is_unpickled_and_it_says_why(store: ObjectStore) -> None:
    sha = shipped(store, {"main.py": "class Count: ...\nmake = Count"})
    data = pickle.dumps(load(store, sha, "main:make")())
    program = "import pickle, sys, millstream.engine.shipping as s\n{}\npickle.loads(bytes.fromhex(sys.argv[1]))"
    ended = python(program.format("sys.meta_path.insert(0, s._FINDER)"), data.hex())
    assert ended.returncode == 1
    assert f"the code {sha[:16]}... is not installed in this process" in ended.stderr
    ready = f"from millstream.store.objects import open_store\ns.ensure(open_store({store.uri!r}), [{sha!r}])"
    assert python(program.format(ready), data.hex()).returncode == 0


def test_a_bundle_writes_no_files(store: ObjectStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    load(store, shipped(store, {"main.py": "import b\ndef f(): return 'no files'", "b.py": ""}), "main:f")
    assert list(Path().iterdir()) == []
