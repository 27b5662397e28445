"""The exchange by itself, on real Spark: every slot gets its task and every payload, on every level, in one job."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
from pyspark import RDD
from pyspark.serializers import NoOpSerializer, pack_long
from pyspark.sql import SparkSession

from millstream.spark.exchange import Exchange

pytestmark = pytest.mark.spark


def messages(spark: SparkSession, partitions: int) -> RDD[bytes]:
    """Raw bytes without a serializer, as Arrow messages come from Spark."""
    sc = spark.sparkContext
    if partitions == 0:
        return RDD(sc._jsc.emptyRDD(), sc, NoOpSerializer())  # type: ignore[union-attr]
    raw = sc.parallelize(range(partitions), partitions).map(lambda i: b"%d" % i)
    raw._bypass_serializer = True  # type: ignore[attr-defined]
    return RDD(raw._jrdd, sc, NoOpSerializer())


def route(producer: int, received: Iterable[bytes]) -> Iterator[bytes]:
    said = b"+".join(received)
    for slot in range(3):
        yield pack_long(slot)
        yield b"%d>%d:%s" % (producer, slot, said)


def pass_on(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    listed = list(pairs)
    [task] = [task for task, _ in listed if task]
    payloads = b",".join(sorted(payload for _, payload in listed if payload))
    for slot in range(3):
        yield pack_long(slot)
        yield b"%s>%d[%s]" % (task, slot, payloads)


def report(pairs: Iterable[tuple[bytes, bytes]]) -> Iterator[bytes]:
    listed = list(pairs)
    [task] = [task for task, _ in listed if task]
    yield task + b" got " + b",".join(sorted(payload for _, payload in listed if payload))


def one_level(producers: int, slot: int) -> bytes:
    return b",".join(b"%d>%d:%d" % (p, slot, p) for p in range(producers))


@pytest.mark.parametrize("producers", [0, 1, 5])
def test_every_slot_gets_its_task_and_one_payload_of_every_producer(spark: SparkSession, producers: int) -> None:
    exchange = Exchange(spark.sparkContext)
    slots = [b"slot0", b"slot1", b"slot2"]
    found, counted = exchange.run(messages(spark, producers), route, [report], slots, ((),) * 3)
    assert counted == producers
    assert found == [b"slot%d got %s" % (slot, one_level(producers, slot)) for slot in range(3)]


@pytest.mark.parametrize("producers", [0, 2])
def test_the_hosts_of_a_level_are_the_producers_of_the_next(spark: SparkSession, producers: int) -> None:
    exchange = Exchange(spark.sparkContext)
    slots = [b"a", b"b", b"c"]
    found, _ = exchange.run(messages(spark, producers), route, [pass_on, report], slots, ((),) * 3)
    expected = []
    for slot, name in enumerate(slots):
        sent = [b"%s>%d[%s]" % (task, slot, one_level(producers, s)) for s, task in enumerate(slots)]
        expected.append(name + b" got " + b",".join(sent))
    assert found == expected
