"""Latencies in closed form against every single record; histograms against sorted lists."""

from __future__ import annotations

import math
import random

import pytest

from bench.latency import Done, Histogram, Span, histogram_of, percentile, span_of, timeline


def some_epochs(seed: int, rate: float) -> list[Done]:
    """Epochs that follow each other, some with a stall."""
    rng, epochs, first, now = random.Random(seed), [], 0, 0.0
    for _ in range(40):
        now += rng.choice([0.1, 0.3, 0.35, 2.5]) * rng.uniform(0.9, 1.1)
        end = int(now * rate)  # what has been created by then is read, and committed later
        committed = now + rng.uniform(0.05, 0.4)
        if end > first:
            epochs.append(Done(first, end, committed))
        first, now = end, committed
    return epochs


def one_by_one(epochs: list[Done], rate: float) -> list[tuple[float, float]]:
    """The creation and the latency of each record."""
    return [(n / rate, done.committed_s - n / rate) for done in epochs for n in range(done.first, done.end)]


@pytest.mark.parametrize("seed", range(5))
def test_the_spans_of_epochs_are_the_latencies_of_their_records(seed: int) -> None:
    epochs = some_epochs(seed, 700)
    spans = [span for done in epochs if (span := span_of(done, 700)) is not None]
    latencies = sorted(latency for _, latency in one_by_one(epochs, 700))
    assert sum(span.count for span in spans) == len(latencies)
    for percent in (50, 90, 99, 99.99, 100):
        expected = latencies[max(1, math.ceil(len(latencies) * percent / 100)) - 1]
        assert percentile(spans, percent) == pytest.approx(expected, abs=2e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_timeline_has_each_record_in_the_moment_of_its_creation(seed: int) -> None:
    rate = 333.0
    epochs = some_epochs(seed, rate)
    moments = list(timeline(epochs, rate, 0.25))
    by_moment: dict[int, list[float]] = {}
    for number, (_, latency) in enumerate(one_by_one(epochs, rate)):
        by_moment.setdefault(math.floor(number / rate / 0.25 + 1e-9), []).append(latency)
    assert [round(moment.at_s / 0.25) for moment in moments] == sorted(by_moment)
    for moment in moments:
        expected = sorted(by_moment[round(moment.at_s / 0.25)])
        assert moment.records == len(expected)
        assert moment.most == pytest.approx(expected[-1])
        assert moment.median == pytest.approx(expected[math.ceil(len(expected) / 2) - 1], abs=2e-6)


@pytest.mark.parametrize("seed", range(5))
def test_a_histogram_counts_each_record_and_errs_by_less_than_a_percent(seed: int) -> None:
    epochs = some_epochs(seed, 500)
    seen = histogram_of(span for done in epochs if (span := span_of(done, 500)) is not None)
    latencies = sorted(latency for _, latency in one_by_one(epochs, 500))
    assert seen.total == len(latencies)
    assert seen.most == pytest.approx(latencies[-1])
    assert seen.percentile(100) == seen.most
    for percent in (1, 50, 90, 99, 99.99):
        exact = latencies[max(1, math.ceil(len(latencies) * percent / 100)) - 1]
        assert exact - 2e-6 <= seen.percentile(percent) <= exact * 1.01


def test_merged_histograms_are_the_histogram_of_all() -> None:
    spans = [Span(0.1, 0.9, 1000), Span(0.5, 0.5, 1), Span(3.0, 7.0, 20)]
    together = Histogram()
    for span in spans:
        together.merge(histogram_of([span]))
    assert together == histogram_of(spans)


def test_a_ccdf_ends_with_nothing_above_the_maximum() -> None:
    points = histogram_of([Span(0.1, 0.2, 99), Span(5.0, 5.0, 1)]).ccdf()
    assert points[-1] == (5.0, 0.0)
    assert points[-2][1] == pytest.approx(0.01)
    assert [above for _, above in points] == sorted((above for _, above in points), reverse=True)


def test_nothing_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no records"):
        percentile([], 50)
    with pytest.raises(ValueError, match="no records"):
        Histogram().percentile(50)
