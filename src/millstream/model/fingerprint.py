"""Fingerprints of user code: whether a restart brings the code that ran before, or other code.

Rules
-----
- A fingerprint is of what a person would call "the same code": the source of a computation's classes or of a function,
  and the plain values that an instance was given. It does not follow calls into other modules.
- It is stable across processes, machines and Python releases wherever the source can be read; where it cannot, it is
  made from the compiled code, which is stable within one release.
"""

from __future__ import annotations

import hashlib
import inspect
import textwrap
import threading
import weakref
from types import CodeType, FunctionType
from typing import Any

_READING = threading.Lock()
_SOURCES: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
"""What has been read: finding a class means parsing its whole file."""
_OURS = ("millstream", "builtins", "abc", "typing")


def fingerprint(code: Any) -> str:
    """The fingerprint of a computation, a transform or a function.

    >>> def one(batch):
    ...     return batch
    >>> def two(batch):
    ...     return None
    >>> fingerprint(one) == fingerprint(one), fingerprint(one) == fingerprint(two)
    (True, False)
    """
    return hashlib.sha256("\n".join(_parts(code, 0)).encode()).hexdigest()[:16]


def _parts(code: Any, depth: int) -> list[str]:
    if depth > 8:
        return ["..."]
    if isinstance(code, FunctionType):
        values = [code.__defaults__, code.__kwdefaults__, [cell.cell_contents for cell in _cells(code)]]
        return [_source(code), *_parts(values, depth + 1)]
    if isinstance(code, type):
        return [f"class {code.__qualname__}"]
    if isinstance(code, dict):
        return [part for name in sorted(code, key=str) for part in (str(name), *_parts(code[name], depth + 1))]
    if isinstance(code, list | tuple | set | frozenset):
        items = sorted(code, key=repr) if isinstance(code, set | frozenset) else code
        return [type(code).__name__, *(part for item in items for part in _parts(item, depth + 1))]
    if code is None or isinstance(code, bool | int | float | str | bytes):
        return [repr(code)]
    classes = [each for each in type(code).__mro__ if each.__module__.partition(".")[0] not in _OURS]
    parts = [type(code).__qualname__, *(_source(each) for each in classes)]
    return parts + _parts(dict(getattr(code, "__dict__", {})), depth + 1)


def _cells(function: FunctionType) -> list[Any]:
    return [cell for cell in function.__closure__ or () if _filled(cell)]


def _filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:
        return False


def _source(code: Any) -> str:
    with _READING:
        if code not in _SOURCES:
            _SOURCES[code] = _read(code)
        return _SOURCES[code]


def _read(code: Any) -> str:
    for _ in range(8):
        try:
            return textwrap.dedent(inspect.getsource(code))
        except SystemError:  # of CPython, if another thread parses, too: the source of a class is found by parsing
            continue
        except (OSError, TypeError):
            break
    if isinstance(code, FunctionType):
        return _compiled(code.__code__)
    found = vars(code).values()
    functions = [each.__func__ if isinstance(each, classmethod | staticmethod) else each for each in found]
    return "".join(_compiled(each.__code__) for each in functions if isinstance(each, FunctionType))


def _compiled(code: CodeType) -> str:
    consts = [_compiled(each) if isinstance(each, CodeType) else repr(each) for each in code.co_consts]
    return f"{code.co_code.hex()} {code.co_names} {consts}"
