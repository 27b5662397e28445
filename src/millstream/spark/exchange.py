"""The located columnar exchange: Spark's own shuffle carries whole payloads, and every slot's task has a place.

Rules
-----
- Each producer task yields exactly one payload per slot, so the consuming side can be zipped, element by element, with
  a located RDD: partition s of it lies where slot s should run, and its first element carries the slot's task.
- One job, whatever the number of levels: route, then one exchange and one stage of hosts per level. The hosts of a
  level are the producers of the next; those of the last yield reports.
- The located elements are made with a constant number of calls into the JVM, and exist even when the epoch has no
  input partition at all.
- A place is a preference. A task must be right wherever it runs; only its caches are colder elsewhere.
- The epoch's thread and upkeep's use it at the same time: what is kept here is never changed once it is made.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pyspark import RDD, SparkContext
from pyspark.serializers import NoOpSerializer, PairDeserializer

Places = tuple[tuple[str, ...], ...]
"""For each slot, the preferred locations, as Spark writes them; empty for "anywhere"."""


_PLACEMENTS = 256

Route = Callable[[int, Iterable[bytes]], Iterable[bytes]]
"""From a producer's number and its Arrow messages: for each slot, the packed slot number, then the payload."""

Host = Callable[[Iterable[tuple[bytes, bytes]]], Iterable[bytes]]
"""From (task or nothing, payload or nothing) pairs: as `Route`, or for the last level, reports."""


class Exchange:
    """Builds the RDDs of an epoch."""

    def __init__(self, sc: SparkContext) -> None:
        self._sc = sc
        self._jvm: Any = sc._jvm
        self._known_places: dict[Places, Any] = {}

    def run(
        self, records: RDD[bytes], route: Route, hosts: Sequence[Host], slots: Sequence[bytes], places: Places
    ) -> tuple[list[bytes], int]:
        """Routes the records, hosts every slot on every level, and collects what the last level yields.

        Returns the number of map tasks too.
        """
        producers = records.getNumPartitions()
        if producers:
            received = self._exchanged(records.mapPartitionsWithIndex(route), producers, slots, places)
        else:
            alone: RDD[bytes] = RDD(self._located(slots, 1, places), self._sc, NoOpSerializer())
            received = alone.map(lambda task: (task, b""))
        for host in hosts[:-1]:
            received = self._exchanged(received.mapPartitions(host), len(slots), slots, places)
        return received.mapPartitions(hosts[-1]).collect(), producers

    def _exchanged(self, sent: Any, producers: int, slots: Sequence[bytes], places: Places) -> RDD[Any]:
        """What each slot receives: its task once, and one payload from every producer."""
        sent._bypass_serializer = True  # it yields (slot, payload) pairs as raw bytes
        pairs = self._jvm.PairwiseRDD(sent._jrdd.rdd()).asJavaPairRDD()
        shuffled = pairs.partitionBy(self._jvm.PythonPartitioner(len(slots), 0))
        zipped = self._located(slots, producers, places).zip(self._jvm.PythonRDD.valueOfPair(shuffled))
        both = PairDeserializer(NoOpSerializer(), NoOpSerializer())  # type: ignore[no-untyped-call]
        return RDD(zipped, self._sc, both)

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
        tag = jvm.scala.reflect.ClassTag.apply(jvm.java.lang.Class.forName("[B"))
        rdd = jvm.org.apache.spark.rdd.ParallelCollectionRDD(
            context, convert(elements).toSeq(), len(tasks), self._scala_places(places), tag
        )
        return rdd.toJavaRDD()

    def _scala_places(self, places: Places) -> Any:
        """The places as Spark wants them: made once per placement, because it takes calls for every slot."""
        known = self._known_places.get(places)
        if known is None:
            preferred = self._jvm.java.util.HashMap()
            for slot, where in enumerate(places):
                names = self._jvm.java.util.ArrayList()
                for place in where:
                    names.add(place)
                preferred.put(slot, self._jvm.scala.jdk.javaapi.CollectionConverters.asScala(names).toSeq())
            known = self._jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(preferred)
            if len(self._known_places) > _PLACEMENTS:
                self._known_places.clear()
            self._known_places[places] = known
        return known
