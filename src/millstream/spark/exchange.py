"""The located columnar exchange: Spark's own shuffle carries whole payloads, and every slot's task has a place.

Rules
-----
- Each map task yields exactly one payload per slot, so the reduce side can be zipped, element by element, with a
  located RDD: partition s of it lies where slot s should run, and its first element carries the slot's task.
- The located elements are made with a constant number of calls into the JVM, and exist even when the epoch has no
  input partition at all.
- A place is a preference. A task must be right wherever it runs; only its caches are colder elsewhere.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyspark import RDD, SparkContext
from pyspark.serializers import NoOpSerializer, PairDeserializer

Places = tuple[tuple[str, ...], ...]
"""For each slot, the preferred locations, as Spark writes them; empty for "anywhere"."""


class Exchange:
    """Builds the RDDs of an epoch."""

    def __init__(self, sc: SparkContext) -> None:
        self._sc = sc
        self._jvm: Any = sc._jvm
        self._places: Places = ()
        self._scala_places: Any = None

    def run(
        self,
        records: RDD[bytes],
        route: Callable[[int, Iterable[bytes]], Iterable[bytes]],
        host: Callable[[Iterable[tuple[bytes, bytes]]], Iterable[bytes]],
        slots: Sequence[bytes],
        places: Places,
    ) -> tuple[list[bytes], int]:
        """Routes the records, hosts every slot, and collects what the hosts yield.

        `route` yields, for each slot, the packed slot number and the payload. Returns the number of map tasks too.
        """
        producers = records.getNumPartitions()
        located = self._located(slots, max(1, producers), places)
        if producers == 0:
            empty: RDD[bytes] = RDD(located, self._sc, NoOpSerializer())
            return empty.mapPartitions(lambda tasks: host((task, b"") for task in tasks)).collect(), 0
        routed: Any = records.mapPartitionsWithIndex(route, preservesPartitioning=True)
        routed._bypass_serializer = True  # it yields (slot, payload) pairs as raw bytes
        pairs = self._jvm.PairwiseRDD(routed._jrdd.rdd()).asJavaPairRDD()
        shuffled = pairs.partitionBy(self._jvm.PythonPartitioner(len(slots), 0))
        zipped = located.zip(self._jvm.PythonRDD.valueOfPair(shuffled))
        payloads: RDD[Any] = RDD(zipped, self._sc, PairDeserializer(NoOpSerializer(), NoOpSerializer()))  # type: ignore[no-untyped-call]
        return payloads.mapPartitions(host).collect(), producers

    def run_located(
        self, tasks: Sequence[bytes], work: Callable[[Iterable[bytes]], Iterable[bytes]], places: Places
    ) -> list[bytes]:
        """Runs one located task per element, without an exchange."""
        return RDD(self._located(tasks, 1, places), self._sc, NoOpSerializer()).mapPartitions(work).collect()

    def _located(self, tasks: Sequence[bytes], copies: int, places: Places) -> Any:
        """A JavaRDD with one partition per task: the task's bytes first, then empty elements up to `copies`."""
        jvm, context = self._jvm, self._sc._jsc.sc()
        flat = [part for task in tasks for part in (task, *([b""] * (copies - 1)))]
        elements = jvm.net.razorvine.pickle.Unpickler().loads(pickle.dumps(flat, protocol=4))
        convert = jvm.scala.jdk.javaapi.CollectionConverters.asScala
        if places != self._places or self._scala_places is None:
            preferred = jvm.java.util.HashMap()
            for slot, where in enumerate(places):
                names = jvm.java.util.ArrayList()
                for place in where:
                    names.add(place)
                preferred.put(slot, convert(names).toSeq())
            self._scala_places = jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(preferred)
            self._places = places
        tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
        rdd = jvm.org.apache.spark.rdd.ParallelCollectionRDD(
            context, convert(elements).toSeq(), len(tasks), self._scala_places, tag
        )
        return rdd.toJavaRDD()
