"""The examples do what they say: against sequential oracles, wherever epochs end, and as programs on Spark."""

from __future__ import annotations

import random
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pyspark.sql import SparkSession

import airlines
import fraud
import inputs
import zeitgeist
from millstream.testing import CRASH, Simulated
from pages import ROOT, fences_of

EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
Epochs = list[list[Any]]


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_stay_short(name: str) -> None:
    assert len((ROOT / "examples" / name).read_text().splitlines()) < 80


def cut(rng: random.Random, rows: Sequence[Any], count: int) -> Epochs:
    """The rows in so many epochs, some of them maybe empty."""
    ends = sorted(rng.randrange(len(rows) + 1) for _ in range(count - 1))
    return [list(rows[a:b]) for a, b in zip([0, *ends], [*ends, len(rows)], strict=True)]


def simulate(example: ModuleType, source: str, schema: str, epochs: Epochs, crash_at: int) -> Simulated:
    """Runs the query of an example; in one epoch the driver dies just before the commit, and another one goes on."""
    simulated = Simulated(example.build(None, "nowhere"), {source: schema}, slots=3)
    for number, rows in enumerate(epochs):
        simulated.feed(**{source: [*rows, CRASH.at("executed")] if number == crash_at else rows})
    return simulated


def watermark(epochs: Epochs, column: int, lateness: timedelta) -> datetime:
    return max(row[column] for rows in epochs for row in rows) - lateness


# -- Zeitgeist


def odd_seconds(rows: Sequence[tuple[str, datetime]]) -> dict[str, Counter[tuple[Any, ...]]]:
    """What should be found in searches of which none is late."""
    counts: dict[str, Counter[int]] = defaultdict(Counter)
    for query, ts in rows:
        counts[query][int(ts.timestamp()) + 1] += 1
    last = int((max(ts for _, ts in rows) - timedelta(seconds=2)).timestamp())
    found: dict[str, Counter[tuple[Any, ...]]] = {"spikes": Counter(), "dips": Counter()}
    for query, mine in counts.items():
        average, run = None, ""
        for second in range(min(mine), last + 1):
            came = mine[second]
            expected = came if average is None else average
            sign = "+" if came > 2 * expected else "-" if came < expected / 2 else ""
            run = run + sign if sign and run.endswith(sign) else sign
            if len(run) == 3:
                row = (query, datetime.fromtimestamp(second, UTC), came, round(expected, 1))
                found["spikes" if sign == "+" else "dips"][row] += 1
            average = came if average is None else 0.95 * average + 0.05 * came
    return found


def unsteady_searches(rng: random.Random) -> list[tuple[str, datetime]]:
    found = []
    for query in ("a", "b", "c", "d"):
        rate = 10
        for second in range(rng.randrange(5), 60):
            rate = rng.choice([0, 3, 10, 40]) if rng.random() < 0.15 else rate
            found += [(query, inputs.EVENING + timedelta(seconds=second + rng.random())) for _ in range(rate)]
    return sorted(found, key=lambda row: row[1] + timedelta(seconds=1.9 * rng.random()))


def test_zeitgeist_finds_the_spikes_and_dips_that_a_sequential_run_finds(rng: random.Random) -> None:
    found = 0
    for rows in [inputs.searches(), *(unsteady_searches(rng) for _ in range(6))]:
        epochs = cut(rng, rows, 7)
        simulated = simulate(zeitgeist, "searches", zeitgeist.SEARCHES, epochs, crash_at=rng.randrange(7))
        expected = odd_seconds(rows)
        assert simulated.late("counter") == 0
        assert Counter(simulated.outputs("spikes_out")) == expected["spikes"]
        assert Counter(simulated.outputs("dips_out")) == expected["dips"]
        found += sum(map(len, expected.values()))
    assert found > 20


# -- airlines


def test_airlines_adds_up_what_a_sequential_run_adds_up(rng: random.Random) -> None:
    for planes in (1, 8, 30):
        rows = inputs.flights(planes, seed=rng.randrange(1000))
        epochs = cut(rng, rows, 6)
        simulated = simulate(airlines, "flights", airlines.FLIGHTS, epochs, crash_at=rng.randrange(6))
        flights: Counter[tuple[str, int]] = Counter()
        minutes: Counter[tuple[str, int]] = Counter()
        air: Counter[str] = Counter()
        for day, tail, _, _, delay, in_air, cancelled in rows:
            if not cancelled and tail is not None:
                flights[tail, day.year] += 1
                minutes[tail, day.year] += max(delay, 0)
                air[tail] += in_air
        expected = []
        for year in (2004, 2005, 2006):
            mine = [(minutes[tail, y], tail) for tail, y in flights if y == year]
            worst, plane = max(mine)
            expected.append((year, len(mine), plane, flights[plane, year], worst))
        assert simulated.late("years") == 0
        assert sorted(simulated.outputs("out")) == expected
        assert dict(simulated.state("air")) == air
        assert {year for _, year, _ in simulated.state("years", "flights")} <= {2007}, "years that are over are gone"


# -- fraud


class Cards:
    """The sessions and alerts of payments, from all of them in the order of their times."""

    def __init__(self, epochs: Epochs) -> None:
        self.late, self.rejected = [], []
        mark = None
        good = []
        for rows in epochs:
            for row in rows:
                if mark is not None and row[2] < mark:
                    self.late.append(row)
                elif row[3] is None or row[3] <= 0:
                    self.rejected.append(row)
                else:
                    good.append(row)
            if rows:
                newest = watermark([rows], 2, timedelta(minutes=5))
                mark = newest if mark is None else max(mark, newest)
        assert mark is not None
        self.sessions: list[Any] = []
        self.alerts: list[Any] = []
        for card in {row[1] for row in good}:
            self._card(card, sorted((ts, amount) for _, each, ts, amount in good if each == card and ts <= mark), mark)

    def _card(self, card: str, paid: list[tuple[datetime, float]], mark: datetime) -> None:
        sessions: list[list[tuple[datetime, float]]] = []
        usual, recent = None, []
        for ts, amount in paid:
            if not sessions or ts - sessions[-1][-1][0] > fraud.SILENCE:
                sessions.append([])
                recent = []
            sessions[-1].append((ts, amount))
            usual = amount if usual is None else usual
            if amount > 10 * usual:
                self.alerts.append((card, ts, f"{amount:.2f} is far above the usual {usual:.2f}"))
            usual = 0.9 * usual + 0.1 * amount
            recent = [*recent, ts][-4:]
            if len(recent) == 4 and ts - recent[0] < fraud.HASTE:
                self.alerts.append((card, ts, "four payments within a minute"))
                recent = []
        for session in sessions:
            began, ended = session[0][0], session[-1][0]
            if ended + fraud.SILENCE <= mark:
                total = 0.0
                for _, amount in session:
                    total += amount
                self.sessions.append((card, began, ended, len(session), round(total, 2)))


def hasty_payments(rng: random.Random) -> list[tuple[Any, ...]]:
    """Payments of any disorder, in bursts, some of them with amounts that make no sense."""
    found = []
    for card in ("a", "b", "c"):
        ts = inputs.EVENING
        for _ in range(80):
            ts += timedelta(seconds=rng.choice([5, 100, 600, 1000, 4000]) * rng.uniform(0.5, 1.5))
            amount = rng.choice([10.0, 15.0, 20.0, 300.0, 2000.0, -5.0, None])
            found.append((ts + timedelta(minutes=rng.choice([1, 1, 1, 60]) * rng.random()), (card, ts, amount)))
    return [(number, *row) for number, (_, row) in enumerate(sorted(found, key=lambda pair: pair[0]))]


def test_fraud_reports_the_sessions_and_alerts_that_a_sequential_run_reports(rng: random.Random) -> None:
    alerts, late = 0, 0
    for rows in [inputs.payments(), *(hasty_payments(rng) for _ in range(6))]:
        epochs = cut(rng, rows, 8)
        simulated = simulate(fraud, "payments", fraud.PAYMENTS, epochs, crash_at=rng.randrange(8))
        expected = Cards(epochs)
        assert Counter(simulated.outputs("sessions_out")) == Counter(expected.sessions)
        assert Counter(simulated.outputs("alerts_out")) == Counter(expected.alerts)
        assert Counter(simulated.outputs("rejected_out")) == Counter(expected.rejected)
        assert Counter(simulated.outputs("late_out")) == Counter(expected.late)
        alerts, late = alerts + len(expected.alerts), late + len(expected.late)
    assert alerts > 20
    assert late > 20


# -- on Spark


def shown(example: str) -> str:
    """What the tutorial says that an example prints."""
    [found] = [f for f in fences_of(ROOT / "docs" / "tutorial.md") if f.code == f"python examples/{example}.py\n"]
    assert found.shows is not None
    return found.shows


@pytest.mark.spark
@pytest.mark.slow
@pytest.mark.parametrize("name", ["zeitgeist", "airlines", "fraud"])
def test_examples_on_spark_print_what_the_tutorial_shows(
    name: str, spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    path = ROOT / "examples" / f"{name}.py"
    exec(compile(path.read_text(), str(path), "exec"), {"__name__": "__main__"})
    assert capsys.readouterr().out.strip() == shown(name).strip()
