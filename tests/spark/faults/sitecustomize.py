"""Faults for real processes: Python runs this file in every process of a job under test, driver and workers alike.

Put this folder on PYTHONPATH and name a folder in MILLSTREAM_TEST_FAULTS. While that folder has a file `armed`, store
operations that fit it are counted over all processes, and the `at`-th one does as `mode` says:
    refuse       raises and does nothing
    lose         does it, and loses the reply
    kill         the process kills itself (SIGKILL) instead of doing it
    kill_after   the process does it and kills itself
    stop         the process stops itself (SIGSTOP), and does it when somebody lets it go on
`armed` is JSON: {"at", "mode"}, and to narrow it down "operations" (names), "match" (part of the object's name) and
"role" ("driver" or "worker"). What was hit is written to `fired`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

FOLDER = os.environ.get("MILLSTREAM_TEST_FAULTS")
ROLE = "worker" if any(word.endswith(".daemon") for word in sys.orig_argv) else "driver"


def hit(operation: str, name: str) -> str:
    """Counts an operation; the mode if this is the one that fails, else nothing."""
    folder = Path(str(FOLDER))
    try:
        armed = json.loads((folder / "armed").read_text())
    except FileNotFoundError:
        return ""
    if operation not in armed.get("operations", [operation]) or armed.get("match", "") not in name:
        return ""
    if armed.get("role", ROLE) != ROLE:
        return ""
    counter = os.open(folder / "count", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(counter, b".")
        number = os.lseek(counter, 0, os.SEEK_CUR)  # where our own byte ended, whoever else appends
    finally:
        os.close(counter)
    if number != armed["at"]:
        return ""
    (folder / "fired").write_text(f"{ROLE} {operation} {name} {os.getpid()}")
    return str(armed["mode"])


def install() -> None:
    from millstream.errors import StoreUnavailable
    from millstream.store.objects import ObjectStoreBackend

    def faulty(operation: str) -> Any:
        original = getattr(ObjectStoreBackend, operation)

        def wrapped(self: Any, what: Any, *rest: Any) -> Any:
            names = [what] if isinstance(what, str) else list(what)
            mode = hit(operation, " ".join(names))
            if mode == "refuse":
                raise StoreUnavailable(f"{operation} of {names} refused (injected)")
            if mode in ("kill", "stop"):
                os.kill(os.getpid(), signal.SIGKILL if mode == "kill" else signal.SIGSTOP)
            result = original(self, what if isinstance(what, str) else names, *rest)
            if mode == "lose":
                raise StoreUnavailable(f"the reply to {operation} of {names} was lost (injected)")
            if mode == "kill_after":
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    for operation in ("create", "put", "get", "list", "delete"):
        setattr(ObjectStoreBackend, operation, faulty(operation))


if FOLDER:
    install()
