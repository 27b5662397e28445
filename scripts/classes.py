"""Spark's classes in an archive that every JVM of a test can map, instead of loading and checking them by itself.

A JVM of a test lives for seconds, and spends most of the first five on some ten thousand classes; on two cores, all
tests together start dozens. The archive is made once for each Java and PySpark, by a job with all that our queries
use, and lies in .venv. A JVM that cannot use it goes on without.
"""

from __future__ import annotations

import hashlib
import os
import random
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"  # an archive fits only JVMs with the same collector


def options(make: bool) -> str:
    """What a JVM of a test is started with; without the archive, the first part only. It may be made if it is not
    there, which takes about as long as three tests."""
    java = os.environ.get("JAVA_HOME", "")
    key = hashlib.sha256(f"{java} {version('pyspark')}".encode()).hexdigest()[:16]
    made = Path(sys.prefix, f"spark-classes-{key}.jsa")
    if make and not made.exists():
        print("test: an archive of Spark's classes is made, once", flush=True)
        with tempfile.TemporaryDirectory(prefix="millstream-classes-", dir=sys.prefix) as folder:
            _make(Path(folder), made)
    return f"{QUICK} -XX:SharedArchiveFile={made} -Xlog:disable -Xlog:all=error:stderr" if made.exists() else QUICK


def _make(folder: Path, made: Path) -> None:
    sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "spark")]
    from processes import add_input, job

    target = folder / "made"
    add_input(folder, random.Random(0), files=8)
    os.environ["SPARK_SUBMIT_OPTS"] = f"{QUICK} -XX:ArchiveClassesAtExit={target} -Xlog:disable"
    with job(folder, "local[2]", "plain") as process:
        _, err = process.communicate(timeout=300)  # until the JVM has ended, too
    if process.returncode == 0 and target.exists():
        target.rename(made)
    else:
        print(f"test: it could not be made, so each JVM takes some seconds more to start: {err[-500:]}", flush=True)
