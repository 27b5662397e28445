"""Code that is handed over as it is in this process: an edited and reloaded module is what workers run.

Rules
-----
- Classes, functions and modules of the user's own code travel by value; those that are installed, of the standard
  library, of Spark, or of Millstream, by reference; those of a bundle too, under their hashed name.
- Functions take along the globals that they use, not their whole module. A module travels whole only where it is named
  itself (`import rules`, then `rules.check()`). Modules may import each other. What of such a module cannot be pickled
  (a lock, a session) stays behind, and says so where it is used.
- An import statement inside of a function is carried out where the function runs, and finds what is there.
- The pickler is Spark's copy of cloudpickle, which is given: the engine knows no Spark. Its registry of modules is
  left as it was found.
"""

from __future__ import annotations

import io
import os
import sys
from collections import ChainMap
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import Any

from millstream.engine.bundles import is_installed
from millstream.engine.shipping import PREFIX

_LOCK = Lock()
_ON_WORKERS = {"millstream", "pyspark", "py4j", "__main__", "__mp_main__"}
"""Packages that every worker has; what the main program defines travels by value anyway."""
_MADE_ANEW = {"__builtins__", "__loader__", "__spec__", "__cached__"}


def by_value(value: Any, cloudpickle: Any) -> bytes:
    """A computation or function, pickled with the user's own code. Raises what the pickler raises."""
    own = {name: module for name, module in list(sys.modules.items()) if _is_own(name, module)}
    with _LOCK, _registered(own, cloudpickle):
        return _pickled(value, own, cloudpickle, whole=True)


def _pickled(value: Any, own: dict[str, ModuleType], cloudpickle: Any, whole: bool) -> bytes:
    """Without `whole`, modules are empty: enough to see whether anything else is in the way."""
    given = cloudpickle.Pickler.dispatch_table

    def reduce_module(module: ModuleType) -> Any:
        if own.get(module.__name__) is not module:
            return given[ModuleType](module)
        if not whole:
            return _new_module, (module.__name__,)
        return _new_module, (module.__name__,), _contents(module, own, cloudpickle), None, None, _fill_module

    kind = type("Pickler", (cloudpickle.Pickler,), {"dispatch_table": ChainMap({ModuleType: reduce_module}, given)})
    out = io.BytesIO()
    kind(out).dump(value)
    return out.getvalue()


def _contents(
    module: ModuleType, own: dict[str, ModuleType], cloudpickle: Any
) -> tuple[dict[str, Any], dict[str, str]]:
    """What of a module travels, and why the rest does not."""
    kept: dict[str, Any] = {}
    lost: dict[str, str] = {}
    for name, value in vars(module).copy().items():
        if name in _MADE_ANEW:
            continue
        try:
            _pickled(value, own, cloudpickle, whole=False)
            kept[name] = value
        except Exception as error:
            lost[name] = f"{type(error).__name__}: {error}"
    return kept, lost


def _new_module(name: str) -> ModuleType:
    return ModuleType(name)


def _fill_module(module: ModuleType, contents: tuple[dict[str, Any], dict[str, str]]) -> None:
    kept, lost = contents
    name = module.__name__
    vars(module).update(kept)

    def absent(attribute: str) -> Any:
        if attribute in lost:
            raise AttributeError(
                f"{name}.{attribute} could not be sent to workers ({lost[attribute]}): make it in setup()"
            )
        raise AttributeError(f"module {name!r} has no attribute {attribute!r}")

    if lost:
        vars(module).setdefault("__getattr__", absent)


@contextmanager
def _registered(own: dict[str, ModuleType], cloudpickle: Any) -> Iterator[None]:
    """The modules are pickled by value meanwhile."""
    before = cloudpickle.list_registry_pickle_by_value()
    added = [module for name, module in own.items() if name not in before]
    try:
        for module in added:
            cloudpickle.register_pickle_by_value(module)
        yield
    finally:
        for name in cloudpickle.list_registry_pickle_by_value() & {module.__name__ for module in added}:
            cloudpickle.unregister_pickle_by_value(own[name])


def _is_own(name: str, module: Any) -> bool:
    """Whether a module is the user's, and from a source file."""
    head = name.split(".")[0]
    if not isinstance(module, ModuleType) or getattr(module, "__name__", None) != name:
        return False
    if head in _ON_WORKERS or head in sys.stdlib_module_names or head.startswith(PREFIX):
        return False
    path = getattr(module, "__file__", None)
    if not isinstance(path, str) or not path.endswith((".py", ".pyc")):
        return False
    return not _is_elsewhere(os.path.dirname(path))


@lru_cache(maxsize=4096)
def _is_elsewhere(folder: str) -> bool:
    """Whether what lies in a folder is installed, or of a Spark that is."""
    spark = os.environ.get("SPARK_HOME")
    return is_installed(folder) or bool(spark and Path(spark).resolve() in Path(folder).resolve().parents)
