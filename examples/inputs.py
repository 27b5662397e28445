"""Made-up input for the examples: always the same, in the order in which it arrives, which is not that of its times."""

import csv
import os
import random
import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

EVENING = datetime(2025, 6, 1, 20, tzinfo=UTC)


def searches(seconds=60, seed=7):
    """(query, ts), up to a second out of order: "eclipse" spikes in second 30, "football" stops in second 40."""
    rng, found = random.Random(seed), []
    for second in range(seconds):
        rates = {"weather": 20, "cat videos": 12, "eclipse": 60 if second >= 30 else 6, "football": 15 * (second < 40)}
        for query, rate in rates.items():
            for _ in range(rng.randint(rate * 3 // 4, rate * 5 // 4)):
                found.append((query, EVENING + timedelta(seconds=second + rng.random())))
    return _shaken(rng, found, 1, timedelta(seconds=1))


def flights(planes=8, years=(2004, 2005, 2006), seed=7):
    """(FlightDate, TailNum, Origin, Dest, ArrDelay, AirTime, Cancelled), as the On-Time data has them: three a month
    and plane, up to ten days out of order, and one in the January after. Cancelled ones may even have no plane."""
    rng, found = random.Random(seed), []
    for plane in range(101, 101 + planes):
        days = [datetime(y, m, rng.randint(1, 28), tzinfo=UTC) for y in years for m in range(1, 13) for _ in range(3)]
        for day in [*days, datetime(years[-1] + 1, 1, 28, tzinfo=UTC)]:
            origin, dest = rng.sample(["ATL", "DEN", "JFK", "LAX", "ORD", "SFO"], 2)
            if rng.random() < 0.05:
                found.append((day, rng.choice([f"N{plane}", None]), origin, dest, None, None, 1))
            else:
                delay = rng.choice([-12, -5, 0, 0, 4, 15, 40, 90])
                found.append((day, f"N{plane}", origin, dest, delay, rng.randint(45, 330), 0))
    return _shaken(rng, found, 0, timedelta(days=10))


def payments(cards=6, hours=8, seed=7):
    """(id, card, ts, amount): bursts with pauses between them, up to two minutes out of order. One card is stolen, one
    amount far too high, one nonsense, and one payment comes hours too late."""
    rng, found = random.Random(seed), []
    for card in range(cards):
        ts = EVENING + timedelta(seconds=rng.randint(0, 3600))
        while ts < EVENING + timedelta(hours=hours):
            for _ in range(rng.randint(1, 4)):
                found.append((f"card {card}", ts, round(rng.uniform(5, 80), 2)))
                ts += timedelta(seconds=rng.randint(60, 360))
            ts += timedelta(seconds=rng.randint(1800, 7200))
    stolen = EVENING + timedelta(hours=hours / 2)
    found += [("card 2", stolen + timedelta(seconds=7 * n), 30.0 + n) for n in range(6)]
    found += [("card 4", stolen, 2500.0), ("card 5", stolen, -1.0)]
    arrived = _shaken(rng, found, 1, timedelta(minutes=2))
    arrived.insert(len(arrived) * 3 // 4, ("card 1", stolen - timedelta(hours=1), 12.5))
    return [(number, *payment) for number, payment in enumerate(arrived)]


def _shaken(rng, rows, column, by):
    """Rows in the order of their times, each up to so much late."""
    return sorted(rows, key=lambda row: row[column] + by * rng.random())


def write(rows, files=4):
    """Writes CSV files into a new folder, below `in`. Spark reads files in the order of their times: these are set."""
    folder = Path(tempfile.mkdtemp())
    (folder / "in").mkdir()
    each = -(-len(rows) // files)
    for number in range(files):
        path = folder / "in" / f"{number}.csv"
        with path.open("w", newline="") as file:
            csv.writer(file).writerows(rows[number * each : (number + 1) * each])
        os.utime(path, (number, number))
    return folder
