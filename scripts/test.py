"""Runs the tests. With arguments: pytest with these. Without: all tests, in two processes that share them.

The first half prints as it goes; what the other one has to say follows. The exit code is 0 only if both passed.
tests/halves.py has the rules by which they share.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO

import classes

PYTEST = [sys.executable, "-m", "pytest"]


def in_two_halves() -> int:
    with tempfile.TemporaryDirectory(prefix="millstream-tests-") as folder:
        taken, said = Path(folder, "taken"), Path(folder, "said")
        taken.mkdir()
        with (
            said.open("wb") as out,
            said.open("rb") as heard,
            subprocess.Popen(
                [*PYTEST, f"--half=back:{taken}"], stdin=subprocess.DEVNULL, stdout=out, stderr=out
            ) as back,
            subprocess.Popen([*PYTEST, f"--half=front:{taken}"]) as front,
        ):
            try:
                front.wait()
                print("\n>>> the other half", flush=True)
                while back.poll() is None:  # what comes from now on is printed as it comes: if it hangs, one sees where
                    pass_on(heard)
                    time.sleep(0.1)
                pass_on(heard)
            except KeyboardInterrupt:  # which both have had too
                return 130
    print(f">>> exit codes of the halves: {front.returncode}, {back.returncode}", flush=True)
    return 1 if front.returncode or back.returncode else 0


def pass_on(heard: BinaryIO) -> None:
    sys.stdout.buffer.write(heard.read())
    sys.stdout.flush()


if __name__ == "__main__":
    os.environ.setdefault("SPARK_SUBMIT_OPTS", classes.options(make=not sys.argv[1:]))
    if sys.argv[1:]:
        os.execv(sys.executable, [*PYTEST, *sys.argv[1:]])
    sys.exit(in_two_halves())
