"""What a bundle holds, that it is always the same, and what is refused, all without running any of it."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from millstream.engine import bundles
from millstream.engine.bundles import bundle, unpacked
from millstream.errors import UserError

COUNT = "import millstream as ms\n\nclass Count(ms.Computation): ...\n"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def files_of(target: str) -> set[str]:
    return set(bundle(target).files)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


# -- what is taken along


def test_a_file_takes_along_what_it_reaches_beside_it_and_nothing_else(here: Path) -> None:
    write(
        here,
        {
            "count.py": "import a\nfrom b import x\nimport numpy, os.path, nowhere\n" + COUNT,
            "a.py": "def f():\n    import c\n",
            "b.py": "from lib.tools import t\nfrom deep import inner\n",
            "c.py": "import a, count\n",
            "lib/tools.py": "import lib.more",
            "lib/more.py": "",
            "lib/unused.py": "",
            "deep/inner.py": "",
            "unused.py": "this is not Python",
            "millstream.py": "raise Exception",
        },
    )
    expected = {"count.py", "a.py", "b.py", "c.py", "lib/tools.py", "lib/more.py", "deep/inner.py"}
    assert files_of("count:Count") == files_of("count.py:Count") == files_of(f"{here}/count.py:Count") == expected
    assert bundle("./count.py:Count").entry == "count:Count"


def test_a_module_of_a_package_takes_the_whole_package_along_with_its_data(here: Path) -> None:
    write(
        here,
        {
            "shop/__init__.py": "",
            "shop/counts/__init__.py": "",
            "shop/counts/new.py": "from .. import rules\nfrom beside import x\n" + COUNT,
            "shop/rules.py": "",
            "shop/template.py": "{{ not Python, and not imported }}",
            "shop/words.txt": "the",
            "shop/__pycache__/rules.pyc": "x",
            "shop/.hidden": "x",
            "beside.py": "",
            "other.py": "",
        },
    )
    expected = {
        *("shop/__init__.py", "shop/counts/__init__.py", "shop/counts/new.py", "shop/rules.py", "shop/template.py"),
        *("shop/words.txt", "beside.py"),
    }
    assert files_of("shop.counts.new:Count") == files_of("shop/counts/new.py:Count") == expected
    assert bundle("shop/counts/new.py:Count").entry == "shop.counts.new:Count"


def test_of_what_is_installed_only_what_is_named_is_taken(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = write(
        here / "lib" / "site-packages", {"dist/__init__.py": "import other\n" + COUNT, "other/__init__.py": ""}
    )
    monkeypatch.syspath_prepend(str(site))
    assert files_of("dist:Count") == {"dist/__init__.py"}
    write(here, {"mine.py": "import dist\n" + COUNT})
    assert files_of("mine:Count") == {"mine.py"}


def test_a_wheel_is_taken_whole_but_for_what_is_about_it(here: Path) -> None:
    with zipfile.ZipFile("shop-1.0-py3-none-any.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr("shop/new.py", COUNT)
        wheel.writestr("shop/__init__.py", "")
        wheel.writestr("shop/words.txt", "the")
        wheel.writestr("shop-1.0.dist-info/METADATA", "Name: shop")
    made = bundle("shop-1.0-py3-none-any.whl:shop.new:Count")
    assert made.entry == "shop.new:Count"
    assert set(made.files) == {"shop/new.py", "shop/__init__.py", "shop/words.txt"}
    write(here, {"shop/new.py": COUNT, "shop/__init__.py": "", "shop/words.txt": "the"})
    assert bundle("shop.new:Count") == made, "where the sources lie makes no difference"
    with pytest.raises(UserError, match="no module 'shop.now'.*it has shop.new"):
        bundle("shop-1.0-py3-none-any.whl:shop.now:Count")


# -- always the same


def test_the_hash_follows_from_the_sources_and_nothing_else(tmp_path: Path) -> None:
    sources = {"count.py": "import a, b\n" + COUNT, "a.py": "x = 1", "b.py": ""}
    first = bundle(f"{write(tmp_path / '1', sources)}/count.py:Count")
    again = write(tmp_path / "2", dict(reversed(sources.items())))
    os.utime(again / "a.py", (1, 1))
    (again / "b.py").chmod(0o755)
    assert bundle(f"{again}/count.py:Count") == first
    program = "import sys; from millstream.engine.bundles import bundle; print(bundle(sys.argv[1]).sha)"
    environment = {**os.environ, "PYTHONHASHSEED": "7", "TZ": "Asia/Tokyo"}
    elsewhere = subprocess.run(
        [sys.executable, "-c", program, "count:Count"], cwd=again, env=environment, capture_output=True, text=True
    )
    assert elsewhere.stdout.strip() == first.sha, elsewhere.stderr
    (again / "a.py").write_text("x = 2")
    assert bundle(f"{again}/count.py:Count").sha != first.sha, "of what it imports, too"
    assert unpacked(first.data) == {name: text.encode() for name, text in sources.items()}


def test_the_hash_of_a_bundle_is_known() -> None:
    """It must not change from release to release, or the same code would be shipped anew."""
    assert (
        bundles.sha_of(bundles.packed({"a.py": b"x = 1\n", "b/c.txt": b""}))
        == "81bc590336b9d4900df609a8439f325f704f597cb953830a58f56954a6873809"
    )


# -- what is refused


def test_nothing_is_executed(here: Path) -> None:
    trap = "from pathlib import Path\nPath('executed').touch()\n"
    write(here, {"shop/__init__.py": trap, "shop/new.py": trap + "import beside\n" + COUNT, "beside.py": trap})
    assert "beside.py" in files_of("shop.new:Count")
    assert not Path("executed").exists()
    assert not {"shop", "shop.new", "beside"} & set(sys.modules)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("Count = 7", "m:Count is 7, expected a Computation"),
        ("Count = {'a': 1}", "m:Count is {'a': 1}"),
        ("class Count: ...", "m:Count is a class that is not derived from"),
        ("async def Count(): ...", "m:Count is an async function"),
        ("import json as Count", "m:Count is a module"),
        ("import a.Count\nfrom a import Count", "a:Count is a module"),
        ("from b import Cout as Count", "module 'b' has no 'Cout'; it has Count"),
        ("from b import seven as Count", "b:seven is 7"),
        ("class Counts: ...\ndef count(): ...", "module 'm' has no 'Count'; it has Counts, count"),
        ("class A:\n    class Count: ...\ndef f():\n    Count = 7", "has no 'Count'"),
        ("x = (", "m.py, line 1: '\\(' was never closed"),
        ("import c", "c.py, line 2: .*return"),
        ("x = '\0'", "null byte"),
    ],
)
def test_what_can_be_seen_to_be_wrong_is_refused(here: Path, source: str, expected: str) -> None:
    beside = {"a/Count.py": "", "a/__init__.py": "", "b.py": "class Count: ...\nseven = 7", "c.py": "\nreturn"}
    write(here, {"m.py": source, **beside})
    with pytest.raises(UserError, match=expected):
        bundle("m:Count")


@pytest.mark.parametrize(
    "source",
    [
        "Count = print",
        "def Count(batch): ...",
        "Count: object = make()",
        "@decorated\nclass Count: ...",
        "class Count(metaclass=M): ...",
        "try:\n    from nowhere import Count\nexcept ImportError:\n    Count = None",
        "if x:\n    Count = 7\nelse:\n    def Count(): ...",
        "match x:\n    case 1:\n        Count = f()",
        "with f() as Count:\n    pass",
        "from b import *",
        "from b import Count",
        "from nowhere import Count",
        "def __getattr__(name): ...",
        "globals()['Count'] = f",
        "Count, x = 1, 2",
        "from m import Count",
    ],
)
def test_what_cannot_be_seen_is_left_to_those_who_run_it(here: Path, source: str) -> None:
    write(here, {"m.py": source, "b.py": "from millstream import Computation as Count"})
    assert bundle("m:Count").entry == "m:Count"


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("m", "found 'm', expected module:Name"),
        ("m:", "expected module:Name"),
        (":Count", "expected module:Name"),
        ("m:a b", "expected module:Name"),
        ("nowhere:Count", "no module 'nowhere' here"),
        ("m.inner:Count", "no module 'm.inner' here"),
        ("folder:Count", "the module 'folder' cannot be sent"),
        ("a..b:Count", "no name of a module"),
        ("nowhere.py:Count", "no Python file nowhere.py"),
        ("my-count.py:Count", "'my-count' is no name of a module"),
        ("json:loads", "of the standard library"),
        ("millstream.library.dedupe:Dedupe", "Millstream's own"),
        ("nowhere.whl:a:Count", "cannot read the wheel nowhere.whl"),
        ("m.whl:a:Count", "cannot read the wheel m.whl"),
        ("queue.py:Count", "of the standard library"),
        ("uses_queue:Count", "queue.py has the name of a module of the standard library"),
    ],
)
def test_targets_that_lead_nowhere_are_refused(here: Path, target: str, expected: str) -> None:
    write(here, {"m.py": COUNT, "my-count.py": COUNT, "folder/data.txt": "", "m.whl": "PK", "queue.py": COUNT})
    write(here, {"uses_queue.py": "import queue\n" + COUNT})
    with pytest.raises(UserError, match=expected):
        bundle(target)


@pytest.mark.parametrize("target", ["shop.new:Count", "single:Count", "shop.whl:shop.new:Count", "fast:Count"])
def test_what_is_compiled_is_refused(here: Path, target: str) -> None:
    fast = f"fast{EXTENSION_SUFFIXES[0]}"
    write(
        here, {"shop/__init__.py": "", "shop/new.py": COUNT, f"shop/{fast}": "", fast: "", "single.py": "import fast"}
    )
    with zipfile.ZipFile("shop.whl", "w") as wheel:
        wheel.writestr("shop/new.py", COUNT)
        wheel.writestr(f"shop/{fast}", "")
    with pytest.raises(UserError, match=f"{fast} is compiled, and only Python sources"):
        bundle(target)


def test_what_is_too_large_is_refused_before_it_is_read(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(here, {"shop/__init__.py": COUNT, "shop/data.txt": "x" * 2000})
    bundle("shop:Count")
    with zipfile.ZipFile("shop.whl", "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.write("shop/__init__.py")
        wheel.write("shop/data.txt")
    monkeypatch.setattr(bundles, "MAX_CODE_BYTES", 1000)
    for target in ("shop:Count", "shop.whl:shop:Count"):
        with pytest.raises(UserError, match="files, and may have 1,000 bytes"):
            bundle(target)


def test_what_is_imported_often_counts_once(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    uses = "".join(f"from shop.rules import x{i}\nfrom single import y{i}\n" for i in range(10))
    write(here, {"shop/__init__.py": "", "shop/rules.py": "#" * 300, "single.py": "#" * 300, "m.py": uses + COUNT})
    monkeypatch.setattr(bundles, "MAX_CODE_BYTES", 600 + len(uses + COUNT))
    assert files_of("m:Count") == {"m.py", "single.py", "shop/__init__.py", "shop/rules.py"}


def test_what_is_no_file_is_left_out(here: Path) -> None:
    write(here, {"shop/__init__.py": COUNT})
    os.mkfifo(here / "shop" / "pipe")
    (here / "shop" / "broken").symlink_to("nowhere")
    assert files_of("shop:Count") == {"shop/__init__.py"}


def test_a_folder_that_contains_itself_ends(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundles, "MAX_FILES", 20)
    write(here, {"shop/__init__.py": COUNT})
    (here / "shop" / "again").symlink_to(here / "shop")
    with pytest.raises(UserError, match="in 21 files"):
        bundle("shop:Count")
