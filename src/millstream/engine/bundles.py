"""A bundle: the sources of a module and of what it needs from beside it, as one archive that is the same every time.

Rules
-----
- Nothing of what is bundled is executed, not even imported: modules are found by the import system's finders, without
  importing their packages, and everything else is read from the syntax tree. So what code does only when it runs is not
  seen here: names that are imported by a call, attributes that are assigned by one. `shipping.load` sees them.
- The same sources give the same bytes, on any machine: files in the order of their names, without times, owners and
  compression (two versions of zlib may compress differently).
- Taken along are: the whole package of a module that is in one (also files that are no modules: they may be read with
  `importlib.resources`), and modules and packages in the same folder that can be reached by import statements. What is
  installed (site-packages), of the standard library, or Millstream itself, is expected to be where the code goes;
  only a package that was named itself is taken from there, and alone.
- What is compiled does not travel: it would fit one kind of machine only, and cannot be imported from memory.
"""

from __future__ import annotations

import ast
import importlib
import io
import os
import sys
import sysconfig
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path
from typing import Protocol

from millstream.errors import UserError
from millstream.store.code import MAX_CODE_BYTES, sha_of

MAX_FILES = 10_000

_COMPILED = (*EXTENSION_SUFFIXES, ".so", ".pyd", ".dylib", ".dll")
_ALREADY_THERE = "millstream"
_EXPECTED = "expected module:Name, path/to/file.py:Name or path/to/dist.whl:package.module:Name"


@dataclass(frozen=True, slots=True)
class Bundle:
    """Code that can travel. `entry` is `module:Name`, as it is called inside; `files` is what is in it."""

    data: bytes
    sha: str
    entry: str
    files: tuple[str, ...]


def bundle(target: str) -> Bundle:
    """The code of `module:Name`, `path/to/file.py:Name` or `path/to/dist.whl:package.module:Name`, without running it.

    Modules are looked for in the current folder first, as `python -m` does.
    """
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise UserError(f"found {target!r}, {_EXPECTED}")
    wheel, is_wheel, module = place.rpartition(".whl:")
    if is_wheel:
        sources: _Sources = _Wheel(Path(f"{wheel}.whl"))
    else:
        root, module = _of_file(Path(place)) if place.endswith(".py") or "/" in place else _of_module(place)
        head = module.split(".")[0]
        sources = _Folder(root, only=head if is_installed(str(root)) else None)
    _check_name(module)
    modules = _reached(sources, module)
    if module not in modules:
        raise UserError(f"{target!r}: there is no module {module!r} in {wheel}.whl{_near(module, sources.files)}")
    _check_entry(modules, module, name)
    data = packed(sources.files)
    return Bundle(data, sha_of(data), f"{module}:{name}", tuple(sorted(sources.files)))


# -- the archive


def packed(files: Mapping[str, bytes]) -> bytes:
    """Files as an archive: the same for the same files.

    >>> packed({"a.py": b"", "b.py": b""}) == packed({"b.py": b"", "a.py": b""})
    True
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name in sorted(files):
            info = zipfile.ZipInfo(name)  # from the beginning of 1980
            info.create_system, info.external_attr = 3, 0o644 << 16
            archive.writestr(info, files[name])
    return out.getvalue()


def unpacked(data: bytes) -> dict[str, bytes]:
    """The files of an archive that `packed` has made."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            return {info.filename: archive.read(info) for info in archive.infolist()}
    except (zipfile.BadZipFile, zlib.error, RuntimeError, OSError, EOFError) as error:
        raise UserError(f"this is no bundle of code: found {len(data)} bytes ({error}), expected an archive") from error


def path_of(files: Mapping[str, bytes], module: str) -> str | None:
    """Where the source of a module lies among files."""
    base = module.replace(".", "/")
    return next((path for path in (f"{base}/__init__.py", f"{base}.py") if path in files), None)


def modules_of(files: Mapping[str, bytes]) -> dict[str, str | None]:
    """All modules among files, and where the source of each lies. A folder that holds modules is a package, too, even
    without a source."""
    found: dict[str, str | None] = {}
    for path in files:
        parts = path.removesuffix("/__init__.py").removesuffix(".py").split("/")
        if path.endswith(".py") and all(part.isidentifier() for part in parts):
            for end in range(1, len(parts) + 1):
                name = ".".join(parts[:end])
                found[name] = path_of(files, name)
    return found


# -- where sources are


class _Sources(Protocol):
    files: dict[str, bytes]
    """What is taken along so far."""

    def find(self, module: str) -> str | None:
        """Takes a module along; where it lies among the files. None if it is not from here."""
        ...


class _Folder:
    """The modules below a folder, each taken along when it is asked for; if `only` is given, nothing beside it."""

    def __init__(self, root: Path, only: str | None) -> None:
        self.root, self.files = root, dict[str, bytes]()
        self._only, self._bytes, self._whole = only, 0, set[Path]()

    def find(self, module: str) -> str | None:
        head = module.split(".")[0]
        if head == _ALREADY_THERE or self._only not in (None, head):
            return None
        if path_of(self.files, module) is None:
            self._take(module)
        return path_of(self.files, module)

    def _take(self, module: str) -> None:
        place = self.root
        for part in module.split("."):
            place = place / part
            if (place / "__init__.py").is_file():
                self._take_all(place)
                return
            for suffix in EXTENSION_SUFFIXES:
                if os.path.isfile(f"{place}{suffix}"):
                    raise _is_compiled(f"{place}{suffix}")
            if os.path.isfile(f"{place}.py"):
                self._add(Path(f"{place}.py"))
                return
            if not place.is_dir():
                return

    def _take_all(self, package: Path) -> None:
        self._check_head(package)
        if package in self._whole:
            return
        self._whole.add(package)
        for folder, inner, names in os.walk(package, followlinks=True):
            inner[:] = [name for name in inner if name != "__pycache__" and not name.startswith(".")]
            for name in names:
                if name.endswith(_COMPILED):
                    raise _is_compiled(os.path.join(folder, name))
                path = Path(folder, name)
                if path.is_file() and not name.startswith(".") and not name.endswith((".pyc", ".pyo", "~")):
                    self._add(path)

    def _add(self, path: Path) -> None:
        self._check_head(path)
        name = path.relative_to(self.root).as_posix()
        if name in self.files:
            return
        try:
            self._bytes += path.stat().st_size
            _check_size(self._bytes, len(self.files) + 1, path)
            self.files[name] = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {path}, which is part of the code to be sent: {error}") from error

    def _check_head(self, path: Path) -> None:
        head = path.relative_to(self.root).parts[0].removesuffix(".py")
        if head in sys.stdlib_module_names:
            raise UserError(
                f"{path} has the name of a module of the standard library, and which of them is meant depends on how a "
                "program is started: rename it"
            )


class _Wheel:
    """All that a wheel would install."""

    def __init__(self, path: Path) -> None:
        self.files: dict[str, bytes] = {}
        try:
            with zipfile.ZipFile(path) as archive:
                infos = [each for each in archive.infolist() if not each.is_dir() and not _is_metadata(each.filename)]
                _check_size(sum(info.file_size for info in infos), len(infos), path)
                for info in infos:
                    if info.filename.endswith(_COMPILED):
                        raise _is_compiled(f"{path}: {info.filename}")
                    self.files[info.filename] = archive.read(info)
        except (zipfile.BadZipFile, zlib.error, RuntimeError, OSError, EOFError) as error:
            raise UserError(f"cannot read the wheel {path}: {error}") from error

    def find(self, module: str) -> str | None:
        return path_of(self.files, module)


def _is_metadata(name: str) -> bool:
    return name.split("/")[0].endswith((".dist-info", ".data")) or name.endswith((".pyc", ".pyo"))


def _is_compiled(path: str) -> UserError:
    return UserError(
        f"{path} is compiled, and only Python sources can be sent: install its package on the driver and the workers, "
        "and name a module outside of it that uses it"
    )


def _check_size(size: int, files: int, path: Path) -> None:
    if size > MAX_CODE_BYTES or files > MAX_FILES:
        raise UserError(
            f"the code has, up to {path}, {size:,} bytes in {files:,} files, and may have {MAX_CODE_BYTES:,} bytes in "
            f"{MAX_FILES:,} files: keep data elsewhere, or move the code into a smaller package"
        )


def is_installed(path: str) -> bool:
    """Whether a file belongs to what is installed for this Python, or to Python itself."""
    python = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    here = Path(path).resolve()
    return bool({"site-packages", "dist-packages"} & {*Path(path).parts, *here.parts}) or bool(
        python & {here, *here.parents}
    )


def _of_file(path: Path) -> tuple[Path, str]:
    """The folder that imports start from, and the name of the module: a file may lie in a package."""
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"there is no Python file {path}; {_EXPECTED}")
    root = path.absolute().parent
    parts = [] if path.name == "__init__.py" else [path.stem]
    while (root / "__init__.py").is_file():
        parts.insert(0, root.name)
        root = root.parent
    return root, ".".join(parts)


def _of_module(module: str) -> tuple[Path, str]:
    _check_name(module)
    importlib.invalidate_caches()
    parts = module.split(".")
    spec: ModuleSpec | None = None
    within: Sequence[str] | None = None
    for end in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:end]), within)
        within = None if spec is None else spec.submodule_search_locations
        if spec is None or (within is None and end < len(parts)):
            raise UserError(
                f"there is no module {'.'.join(parts[: end if spec is None else end + 1])!r} here: looked in "
                f"{Path.cwd()} and where Python looks. Go to its folder, or name its file: path/to/file.py:Name"
            )
    origin = Path((spec and spec.origin) or "")
    base = origin.parent if origin.name == "__init__.py" else origin.parent / origin.stem
    if origin.name.endswith(_COMPILED):
        raise _is_compiled(str(origin))
    if origin.suffix != ".py" or not origin.is_file() or base.parts[-len(parts) :] != tuple(parts):
        raise UserError(f"the module {module!r} cannot be sent: found {spec}, expected a file named like the module")
    return Path(*base.absolute().parts[: -len(parts)]), module


def _spec(name: str, within: Sequence[str] | None) -> ModuleSpec | None:
    """Where a module is, without importing its package."""
    path = [str(Path.cwd()), *sys.path] if within is None else within
    found = PathFinder.find_spec(name, path)
    if found is None:
        finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
        found = next((spec for finder in finders if (spec := finder.find_spec(name, within))), None)
    return found


def _check_name(module: str) -> None:
    head, *_ = parts = module.split(".")
    if not all(part.isidentifier() for part in parts):
        raise UserError(f"{module!r} is no name of a module; {_EXPECTED}")
    if head == _ALREADY_THERE or head in sys.stdlib_module_names:
        whose = "Millstream's own" if head == _ALREADY_THERE else "the name of a module of the standard library"
        raise UserError(f"{module!r} is {whose}, and is not sent: name a module of yours")


# -- what sources say


@dataclass(frozen=True, slots=True)
class _Module:
    tree: ast.Module
    is_package: bool


def _reached(sources: _Sources, module: str) -> dict[str, _Module]:
    """A module and all that it reaches by import statements."""
    found: dict[str, _Module] = {}
    waiting, seen = [module], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        waiting.extend([name.rpartition(".")[0]] if "." in name else [])
        path = sources.find(name)
        if path is not None:
            found[name] = _Module(_parsed(path, sources.files[path]), path.endswith("/__init__.py"))
            waiting.extend(_imported(found[name], name))
    return found


def _parsed(path: str, data: bytes) -> ast.Module:
    try:
        tree = ast.parse(data, path)
        compile(tree, path, "exec", dont_inherit=True)  # finds what the parser does not: a return outside of a function
    except (SyntaxError, ValueError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        text = error.msg if isinstance(error, SyntaxError) else str(error)
        raise UserError(f"{path}{line}: {text}. The code cannot be sent before that is mended") from error
    return tree


def _imported(source: _Module, module: str) -> Iterator[str]:
    """What a module may import: `from a import b` imports `a`, and `a.b` if that is a module."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = _base(node, module, source.is_package)
            yield from ([base] if base else [])
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names if alias.name != "*")


def _base(node: ast.ImportFrom, module: str, is_package: bool) -> str:
    """The module that names are imported from."""
    if not node.level:
        return node.module or ""
    parts = module.split(".")
    kept = parts[: len(parts) - node.level + is_package]
    return ".".join([*kept, *([node.module] if node.module else [])])


def _check_entry(modules: Mapping[str, _Module], module: str, name: str) -> None:
    """Refuses a name that is not there, or is neither a computation nor a function, as far as that can be seen."""
    seen = set[tuple[str, str]]()
    while (module, name) not in seen and module in modules:
        seen.add((module, name))
        tree = modules[module].tree
        found = list(_bindings(tree.body, name))
        if not found and f"{module}.{name}" not in modules:
            if _is_open(tree):
                return
            there = [node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))]
            near = get_close_matches(name, there, 3, 0.4) or there[:10]
            raise UserError(
                f"the module {module!r} has no {name!r}; it has {', '.join(near) or 'no class or function'}"
            )
        why = [_why_not(node) for node in found] or ["a module"]
        if all(why):
            raise UserError(f"{module}:{name} is {why[-1]}, expected a Computation or a function")
        if not isinstance(last := found[-1], ast.ImportFrom):
            return
        alias = next(alias for alias in last.names if (alias.asname or alias.name) == name)
        module, name = _base(last, module, modules[module].is_package), alias.name


def _bindings(body: Sequence[ast.stmt], name: str) -> Iterator[ast.stmt]:
    """The statements that give a name its meaning, not inside of classes and functions."""
    for node in body:
        if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            if node.name == name:
                yield node
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            if any((alias.asname or alias.name.split(".")[0]) == name for alias in node.names):
                yield node
        else:
            yield from _bindings_within(node, name)


def _bindings_within(node: ast.stmt, name: str) -> Iterator[ast.stmt]:
    """The same, of a statement that may hold others."""
    for inner in ast.iter_child_nodes(node):
        if isinstance(inner, ast.stmt):
            yield from _bindings([inner], name)
        elif isinstance(inner, (ast.ExceptHandler, ast.match_case)):
            yield from _bindings(inner.body, name)
        elif any(isinstance(p, ast.Name) and p.id == name and isinstance(p.ctx, ast.Store) for p in ast.walk(inner)):
            yield node


def _is_open(tree: ast.Module) -> bool:
    """Whether a module may have names that are not to be seen."""
    if any(isinstance(node, ast.FunctionDef) and node.name == "__getattr__" for node in tree.body):
        return True
    return any(
        (isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names))
        or (isinstance(node, ast.Name) and node.id in ("globals", "exec"))
        for node in ast.walk(tree)
    )


def _why_not(node: ast.stmt) -> str:
    """What a name means, if that can be seen to be neither a computation nor a function; otherwise nothing."""
    if isinstance(node, ast.AsyncFunctionDef):
        return "an async function"
    if isinstance(node, ast.ClassDef) and not (node.bases or node.keywords or node.decorator_list):
        return "a class that is not derived from millstream.Computation"
    if isinstance(node, ast.Import):
        return "a module"
    literal = (ast.Constant, ast.JoinedStr, ast.List, ast.Tuple, ast.Dict, ast.Set)
    if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, literal):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if all(isinstance(target, ast.Name) for target in targets):
            return ast.unparse(node.value)[:80]
    return ""


def _near(module: str, files: Mapping[str, bytes]) -> str:
    near = get_close_matches(module, list(modules_of(files)), 3, 0.4)
    return f"; it has {', '.join(near)}" if near else ""
