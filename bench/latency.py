"""Latencies of an open loop in closed form, and a log-scaled histogram of them.

Record n is created at `n / rate` seconds after the start, whether or not anybody is ready for it, and an epoch is the
records from one number up to another, committed at one moment. So the latencies of an epoch are evenly spaced, and
what is to be known of them follows from three numbers, exactly and for every record.

Rules
-----
- Latency is the time from creation to commit, in seconds. Nothing is sampled: each record counts once.
- A latency is never below zero: a record is in an epoch only after it has been created.
- The buckets of a histogram are `2 ** -SUB_BITS` wide in proportion, so a percentile read from it errs by less than
  one percent, upwards. Maxima are kept exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

SUB_BITS = 7
LEAST_S = 1e-6
"""Latencies below it are counted with it."""

BUCKET_S = 0.25
PERCENTILES = (90.0, 99.0, 99.99, 100.0)


@dataclass(frozen=True, slots=True)
class Done:
    """An epoch of an open loop: the numbers of its records, and when it was committed, in seconds after the start."""

    first: int
    end: int
    committed_s: float
    began_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Span:
    """Evenly spaced latencies: `count` of them, the least first."""

    least: float
    most: float
    count: int

    def up_to(self, limit: float) -> int:
        """How many are not above a limit."""
        if limit < self.least:
            return 0
        if limit >= self.most or self.count == 1:
            return self.count
        return min(self.count, math.floor((limit - self.least) / (self.most - self.least) * (self.count - 1)) + 1)


def span_of(done: Done, rate: float, since_s: float = -math.inf, until_s: float = math.inf) -> Span | None:
    """The latencies of those of an epoch's records that were created from a moment on, and before another."""
    first = done.first if since_s == -math.inf else max(done.first, math.ceil(since_s * rate - 1e-9))
    end = done.end if until_s == math.inf else min(done.end, math.ceil(until_s * rate - 1e-9))
    if first >= end:
        return None
    return Span(
        max(0.0, done.committed_s - (end - 1) / rate),
        max(0.0, done.committed_s - first / rate),
        end - first,
    )


def percentile(spans: Sequence[Span], percent: float) -> float:
    """The least latency that so many percent of the records do not exceed; the maximum for 100."""
    total = sum(span.count for span in spans)
    if not total:
        raise ValueError("no records")
    if percent >= 100:
        return max(span.most for span in spans)
    wanted = max(1, math.ceil(total * percent / 100))
    low, high = min(span.least for span in spans), max(span.most for span in spans)
    if sum(span.up_to(low) for span in spans) >= wanted:
        return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        if sum(span.up_to(middle) for span in spans) >= wanted:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True, slots=True)
class Moment:
    """The records that were created within a quarter of a second."""

    at_s: float
    records: int
    median: float
    p99: float
    most: float


def timeline(epochs: Sequence[Done], rate: float, bucket_s: float = BUCKET_S) -> Iterator[Moment]:
    """What records had to wait for, by when they were created. Moments without records are left out."""
    if not epochs:
        return
    begin = math.floor(min(done.first for done in epochs) / rate / bucket_s)
    last = math.ceil(max(done.end for done in epochs) / rate / bucket_s)
    at = 0
    for number in range(begin, last):
        since, until = number * bucket_s, (number + 1) * bucket_s
        while at < len(epochs) and epochs[at].end / rate <= since:
            at += 1
        spans = []
        for done in epochs[at:]:
            if done.first / rate >= until:
                break
            span = span_of(done, rate, since, until)
            if span is not None:
                spans.append(span)
        if spans:
            yield Moment(
                since,
                sum(span.count for span in spans),
                percentile(spans, 50),
                percentile(spans, 99),
                percentile(spans, 100),
            )


@dataclass(slots=True)
class Histogram:
    """How many latencies fell into each of many buckets whose widths grow with the latency.

    >>> seen = Histogram()
    >>> seen.add(Span(0.100, 0.200, 1001))
    >>> seen.total, round(seen.percentile(50), 3), seen.most
    (1001, 0.15, 0.2)
    """

    counts: dict[int, int] = field(default_factory=dict)
    most: float = 0.0

    @property
    def total(self) -> int:
        """How many there are."""
        return sum(self.counts.values())

    def add(self, span: Span) -> None:
        """Counts evenly spaced latencies."""
        self.most = max(self.most, span.most)
        bucket, counted = _bucket(span.least), 0
        while counted < span.count:
            reached = span.up_to(math.nextafter(_upper(bucket), 0.0)) if _upper(bucket) <= span.most else span.count
            if reached > counted:
                self.counts[bucket] = self.counts.get(bucket, 0) + reached - counted
                counted = reached
            bucket += 1

    def merge(self, other: Histogram) -> None:
        """Adds what another has counted."""
        self.most = max(self.most, other.most)
        for bucket, count in other.counts.items():
            self.counts[bucket] = self.counts.get(bucket, 0) + count

    def percentile(self, percent: float) -> float:
        """The upper end of the bucket in which the percentile lies; the exact maximum for 100."""
        if percent >= 100:
            return self.most
        wanted, found = max(1, math.ceil(self.total * percent / 100)), 0
        for bucket in sorted(self.counts):
            found += self.counts[bucket]
            if found >= wanted:
                return min(self.most, _upper(bucket))
        raise ValueError("no records")

    def ccdf(self) -> list[tuple[float, float]]:
        """For each bucket its upper end, and the share of latencies above it."""
        total, found, points = self.total, 0, []
        for bucket in sorted(self.counts):
            found += self.counts[bucket]
            points.append((min(self.most, _upper(bucket)), (total - found) / total))
        return points


def histogram_of(spans: Iterable[Span]) -> Histogram:
    """The histogram of all of these."""
    found = Histogram()
    for span in spans:
        found.add(span)
    return found


def _bucket(latency: float) -> int:
    """Buckets are consecutive: `2 ** SUB_BITS` of equal width between a power of two and the next."""
    mantissa, exponent = math.frexp(max(latency, LEAST_S) / LEAST_S)  # 0.5 <= mantissa < 1
    return ((exponent - 1) << SUB_BITS) + int((mantissa * 2 - 1) * (1 << SUB_BITS))


def _upper(bucket: int) -> float:
    """Where a bucket ends and the next begins."""
    exponent, part = (bucket + 1) >> SUB_BITS, (bucket + 1) & ((1 << SUB_BITS) - 1)
    return LEAST_S * math.ldexp(1 + part / (1 << SUB_BITS), exponent)
