"""Versions of a query for Spark: its code is pickled, its graph is packed, and workers try both before anything runs.

Rules
-----
- What is refused is refused before anything is written: a graph that does not fit, code that cannot be sent, a worker
  that cannot load it or does not see the store.
- A rewrite that was made in this process is used as it is, so that a `Memory` sink is the user's own; any other process
  gets a copy, from the store.
"""

from __future__ import annotations

import os
import pickle
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

from pyspark import cloudpickle
from pyspark.sql import SparkSession

from millstream.engine.by_value import by_value
from millstream.engine.rehearsal import FAILS
from millstream.engine.sample import Samples
from millstream.engine.shipping import ensure
from millstream.engine.spec import Spec
from millstream.engine.version import Version, fingerprints
from millstream.errors import UserError
from millstream.model.change import Calls
from millstream.model.graph import Graph, resolve
from millstream.model.query import Query
from millstream.model.rewrite import Rewrite
from millstream.spark import tasks
from millstream.spark.limits import time_limit
from millstream.spark.sources import Sources
from millstream.store.cache import CacheSettings
from millstream.store.forms import Forms
from millstream.store.journal import digest_of
from millstream.store.objects import STAGING, ObjectStore


class SparkWorkshop:
    """Makes and tries versions on a Spark session."""

    def __init__(
        self,
        spark: SparkSession,
        store: ObjectStore,
        store_id: str,
        store_options: Mapping[str, str],
        cache: CacheSettings,
        sources: Sources,
        timeout_s: float,
    ) -> None:
        self._spark, self._store, self._store_id = spark, store, store_id
        self._store_options, self._cache, self._sources = dict(store_options), cache, sources
        self._timeout_s = timeout_s
        self._mine: dict[str, Rewrite | Calls] = {}
        self._first: frozenset[str] | None = None

    def build(
        self,
        query: Query,
        forms: Mapping[tuple[str, str], bytes] = MappingProxyType({}),
        bundles: Sequence[str] = (),
        handed: frozenset[str] = frozenset(),
    ) -> Version:
        self._first = self._first if self._first is not None else frozenset(query.sources)
        if not self._sources.named and self._first != query.sources.keys():
            raise UserError(
                "sources can come and go only if all of the query's sources are functions of a reader, "
                "lambda read: read.format(...).load(), and none is a DataFrame: Spark tells only those apart by name"
            )
        graph = resolve(query, self._sources.schemas(query.sources.values()))
        spec = Spec(
            graph.without_code(),
            self._store_id,
            self._store.uri,
            self._store_options,
            codes_of(graph, handed),
            self._cache,
            dict(forms),
            tuple(bundles),
        )
        packed = spec.pack(cloudpickle.dumps)
        return Version(query, graph, fingerprints(query), packed, dict(forms), tuple(bundles), handed)

    def pack_forms(self, forms: Forms) -> bytes:
        return forms.pack(partial(by_value, cloudpickle=cloudpickle))

    def try_out(self, version: Version, samples: Samples | None = None) -> str:
        """Whether all workers can load the version and see the store: an empty string, or what is wrong. That of a
        modification, which comes with samples, must not take too long, and come through a rehearsal."""
        name, expected = f"{STAGING}probe-{secrets.token_hex(6)}", secrets.token_bytes(16)
        self._store.put(name, expected)
        try:
            sc = self._spark.sparkContext
            count = max(2, sc.defaultParallelism)
            prober = tasks.prober(version.spec, name, expected, samples)
            with time_limit(sc, None if samples is None else self._timeout_s) as late:
                found = sc.parallelize(range(count), count).mapPartitionsWithIndex(prober).collect()
        except Exception as error:
            if late.why:
                return f"it was not loaded and tried out on workers within {self._timeout_s:g} s (modify_timeout)"
            lines = [line.strip() for line in str(error).splitlines() if "Error" in line or "Exception" in line]
            return (
                "Spark's Python workers do not run Millstream: "
                + (lines[-1] if lines else type(error).__name__)
                + ". They need the packages of the driver: set PYSPARK_PYTHON to an interpreter that has them, on "
                f"every machine (it is {os.environ.get('PYSPARK_PYTHON', 'not set')!r} now)"
            )
        finally:
            self._store.delete([name])
        troubles: list[str] = sorted({trouble for trouble in found if trouble})
        if not troubles:
            return ""
        if any(FAILS in trouble for trouble in troubles):
            return next(trouble for trouble in troubles if FAILS in trouble)
        return "; ".join(troubles) + ". Every worker must see the same store and the same modules (addPyFile)"

    def pack(self, rewrite: Rewrite | Calls) -> bytes:
        try:
            bundles = rewrite.bundles if isinstance(rewrite, Rewrite) else ()
            data = pickle.dumps((bundles, by_value(rewrite, cloudpickle)))
        except Exception as error:
            raise UserError(
                f"the change cannot be stored ({type(error).__name__}: {error}); keep only plain values on what it "
                "brings, and open connections in setup()"
            ) from error
        self._mine[digest_of(data)] = rewrite
        return data

    def unpack(self, data: bytes) -> Rewrite | Calls:
        mine = self._mine.get(digest_of(data))
        if mine is not None:
            return mine
        bundles, code = pickle.loads(data)
        ensure(self._store, bundles)
        loaded: Any = pickle.loads(code)
        if not isinstance(loaded, Rewrite | Calls):
            raise UserError(f"the code of the modification is a {type(loaded).__name__}, expected a rewrite")
        return loaded


def codes_of(graph: Graph, handed: frozenset[str]) -> dict[str, bytes]:
    """The code of each step and map, as workers get it: by value if it was handed over while the query ran, since their
    modules may be older than the driver's."""
    codes = {}
    given: list[tuple[str, str, Any]] = [
        (f"step {step.name!r}: its computation", step.name, step.computation) for step in graph.steps
    ]
    given += [(f"map {each.name!r}: its function", each.name, each.fn) for each in graph.maps]
    for what, name, code in given:
        try:
            codes[name] = by_value(code, cloudpickle) if name in handed else cloudpickle.dumps(code)  # type: ignore[no-untyped-call]
        except Exception as error:
            raise UserError(
                f"{what} cannot be sent to workers ({type(error).__name__}: {error}); keep only plain values on it, "
                "and open connections in setup()"
            ) from error
    return codes
