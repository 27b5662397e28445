"""Code from a bundle, imported under a name that contains its hash: versions live side by side, and none is ever stale.

Rules
-----
- A module `m` of a bundle is imported as `millstream_code_<hash>.m`, from memory. A process that has imported one
  version (a Python worker is used again and again) imports the next as something else, and nothing has to be restarted.
- Import statements between modules of a bundle stay inside of it: they are rewritten in the syntax tree, so wherever a
  function runs, and however it got there, it finds its own version. All other imports are as usual. Lines and columns
  stay what they were, and tracebacks show them.
- What is pickled by reference names the hashed module. Whoever unpickles it needs the bundle: `ensure` comes first.
- An import that fails takes back the modules that it has imported on the way: the next one starts from the beginning.
- Installing imports nothing. What is installed stays until the process ends.
"""

from __future__ import annotations

import ast
import importlib
import importlib.abc
import io
import sys
import threading
import traceback
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from importlib.resources.abc import Traversable, TraversableResources
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

from millstream.engine.bundles import modules_of, unpacked
from millstream.errors import UserError
from millstream.model.computation import Computation
from millstream.store.code import checked_sha, get_code, sha_of
from millstream.store.objects import ObjectStore

PREFIX = "millstream_code_"


def package_of(sha: str) -> str:
    """The name of the package that the modules of a bundle are imported under."""
    return f"{PREFIX}{sha[:16]}"


def install(data: bytes, sha: str) -> str:
    """Makes the modules of a bundle importable in this process, once; the package that they are in."""
    package = package_of(checked_sha(sha))
    with _LOCK:
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)
        if not has_code(sha):
            if sha_of(data) != sha:
                raise UserError(f"found code with SHA-256 {sha_of(data)}, expected {sha}; it was not used")
            files = unpacked(data)
            _INSTALLED[package] = _Installed(sha, package, data, files, modules_of(files))
    return package


def has_code(sha: str) -> bool:
    """Whether this process has a bundle."""
    found = _INSTALLED.get(package_of(sha))
    if found is not None and found.sha != sha:
        raise UserError(
            f"the code {sha} and the code {found.sha}, which this process has, would be imported under the same name: "
            "change anything in the sources, such as a comment"
        )
    return found is not None


def ensure(store: ObjectStore, shas: Iterable[str]) -> None:
    """Fetches and installs the bundles that this process does not have: before anything is unpickled that is made of
    them."""
    for sha in shas:
        if not has_code(checked_sha(sha)):
            install(get_code(store, sha), sha)


def load(store: ObjectStore, sha: str, entry: str) -> Any:
    """What `entry`, a `module:Name`, means in a bundle of the store: a computation or a function."""
    ensure(store, [sha])
    module, _, name = entry.rpartition(":")
    found = _INSTALLED[package_of(sha)]
    if module not in found.modules:
        raise UserError(f"the code {sha[:16]} has no module {module!r}; it has {', '.join(sorted(found.modules))}")
    try:
        value = getattr(importlib.import_module(f"{found.package}.{module}"), name, None)
    except (Exception, SystemExit) as error:
        raise UserError(
            f"{entry!r} of the code {sha[:16]} cannot be imported here: {type(error).__name__}: {error}"
            f"{_place(error, found.package)}. What it imports must be in the code that is sent, or be installed on the "
            "driver and on every worker"
        ) from error
    if value is None:
        raise UserError(f"the module {module!r} of the code {sha[:16]} has no {name!r}")
    if not callable(value) and not isinstance(value, Computation):
        raise UserError(
            f"{entry!r} of the code {sha[:16]} is a {type(value).__name__}, expected a Computation or a function"
        )
    return value


def _place(error: BaseException, package: str) -> str:
    """Where in a bundle an error comes from."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(f"{package}/")]
    return f" ({frames[-1].filename.partition('/')[2]}, line {frames[-1].lineno})" if frames else ""


# -- the import system


@dataclass(frozen=True, slots=True)
class _Installed:
    sha: str
    package: str
    data: bytes
    files: dict[str, bytes]
    modules: dict[str, str | None]

    @property
    def tops(self) -> frozenset[str]:
        return frozenset(name for name in self.modules if "." not in name)


_INSTALLED: dict[str, _Installed] = {}
_LOCK = threading.Lock()


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of all bundles that are installed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not fullname.startswith(PREFIX):
            return None
        package, _, module = fullname.partition(".")
        found = _INSTALLED.get(package)
        if found is None:
            raise ModuleNotFoundError(
                f"no module {fullname!r}: the code {package.removeprefix(PREFIX)}... is not installed in this process",
                name=fullname,
            )
        if module and module not in found.modules:
            return None
        source = found.modules[module] if module else None
        is_package = source is None or source.endswith("/__init__.py")
        loader = _Loader(found, source or f"{module.replace('.', '/')}/__init__.py".lstrip("/"), is_package)
        spec = spec_from_loader(fullname, loader, origin=loader.get_filename(fullname), is_package=is_package)
        if spec is not None:
            spec.has_location = True
        return spec


_FINDER = _Finder()


class _Loader(importlib.abc.SourceLoader):
    """Imports one module of a bundle."""

    def __init__(self, found: _Installed, path: str, is_package: bool) -> None:
        self._found, self._path, self._is_package = found, path, is_package

    def get_filename(self, fullname: str) -> str:
        return f"{self._found.package}/{self._path}"

    def is_package(self, fullname: str) -> bool:
        return self._is_package

    def get_data(self, path: str) -> bytes:
        name = str(path).removeprefix(f"{self._found.package}/")
        if name in self._found.files:
            return self._found.files[name]
        if name == self._path:  # a folder of modules is a package without a source
            return b""
        raise FileNotFoundError(path)

    def get_resource_reader(self, fullname: str) -> TraversableResources:
        return _Resources(self._found.data, f"{self._path.rpartition('/')[0]}/".lstrip("/"))

    def source_to_code(self, data: Any, path: Any = "<string>") -> Any:  # type: ignore[override]
        tree = _Inside(self._found).visit(ast.parse(data, path))
        return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)

    def exec_module(self, module: ModuleType) -> None:
        above: list[list[str]] = _IMPORTING.__dict__.setdefault("stack", [])
        inner: list[str] = []
        above.append(inner)
        try:
            super().exec_module(module)
        except BaseException:
            for name in inner:
                _forget(name)
            raise
        finally:
            above.pop()
        if above:
            above[-1].extend([*inner, module.__name__])


_IMPORTING = threading.local()
"""For each import that is under way in a thread, the modules that were imported because of it."""


def _forget(name: str) -> None:
    module = sys.modules.pop(name, None)
    parent, _, child = name.rpartition(".")
    if module is not None and getattr(sys.modules.get(parent), child, None) is module:
        delattr(sys.modules[parent], child)


class _Resources(TraversableResources):
    """The files of a package, for `importlib.resources`."""

    def __init__(self, data: bytes, folder: str) -> None:
        self._data, self._folder = data, folder

    def files(self) -> Traversable:
        return zipfile.Path(zipfile.ZipFile(io.BytesIO(self._data)), self._folder)


class _Inside(ast.NodeTransformer):
    """Import statements of a bundle's own modules, made to find them under the bundle's name."""

    def __init__(self, found: _Installed) -> None:
        self._package, self._tops = found.package, found.tops

    def _is_inside(self, module: str) -> bool:
        return module.split(".")[0] in self._tops

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom:
        if not node.level and node.module and self._is_inside(node.module):
            node.module = f"{self._package}.{node.module}"
        return node

    def visit_Import(self, node: ast.Import) -> ast.Import | list[ast.Import]:
        if not any(self._is_inside(alias.name) for alias in node.names):
            return node
        aliases = [new for alias in node.names for new in self._aliases(alias)]
        return [ast.copy_location(ast.Import([alias]), node) for alias in aliases]

    def _aliases(self, alias: ast.alias) -> Iterator[ast.alias]:
        """`import a.b` imports `a.b`, and gives the name `a` to `a`."""
        if not self._is_inside(alias.name):
            yield alias
            return
        head = alias.name.split(".")[0]
        yield ast.copy_location(ast.alias(f"{self._package}.{alias.name}", alias.asname or head), alias)
        if not alias.asname and head != alias.name:
            yield ast.copy_location(ast.alias(f"{self._package}.{head}", head), alias)
