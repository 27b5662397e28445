"""How well replicas are placed: the paper's two experiments on allocation, as simulations, and how long it takes.

    python -m bench.allocation

The paper is CIKM 2015, section 7. Nothing of it runs here: loads are generated, `allocation` places replicas by the
load of the first periods, and in every later period a greedy balancer moves bins away from overloaded workers. Measured
are the paper's two shares, over all those periods: of moves that are replica-assisted (figure 7), and of replicas that
are usable before each round of moves (figure 8). Both are defined in `allocation.balanced` and `allocation.usable`.

**The pair.** The paper's: two operators with 10 bins each; three workers; the first has no bins, the second all of
operator 1, the third all of operator 2; 70 % of the first and third are used by something else, which is where overload
begins; every second 1 % of the data goes over from operator 1 to operator 2. Assumed: all data are half of what a
worker can do; the first 30 of the 100 seconds are the statistics.

**The airline job.** The paper's: operators 1, 2 and 3 on 16 workers, operator 4 on 4 others; 16 to 48 bins for each,
evenly; one replica per bin; 48 minutes, of which the first 15 are the statistics, after which replicas are placed once;
operator 1 sees every record and passes it to operator 3, and what is delayed to operator 2; operators 2 and 3 go by
airplane; operator 4 gets 5 records a second from each of 16 instances, whatever the input; 67,328,899 flights in ten
years; 8,000 records a second; overload from 70 % on, as in the pair.

Its data set is not here. **The flights are a stand-in**, made from a seed: 20 airlines with sizes as 1/rank, each with
4 hubs; 300 airports with sizes as 1/rank, in 4 time zones; 5,000 airplanes; a timetable of a day's flights that follows
the local hours of the day. One period (30 s) is one hour of some 300 days at once, so that the statistics cover a day
and the whole run four. Flights keep their hour; airplanes fly other legs every day, so in these days at all hours that
their airline does. How busy an airline is drifts (20 %). Assumed besides: a fifth of flights are delayed; a record
costs every operator the same; measured loads are off by 5 %; operator 1 goes by flight; the workers that read input
hold no replicas; nothing is balanced during the statistics, and no worker comes or goes; and the job is sized for its
timetable: at its peak, the 16 workers of operators 1 to 3 have, in the mean, what they can bear. What exceeds that is
chance: groups and airlines that are busier than others. The rows with other names, all with the most bins, show what
becomes of the result without each of these.

Two assumptions were changed after their results had been seen, and remain as a row, "as it was at first". Airplanes
kept their hours, day by day, which airplanes do not. And the peak was 95 % of what all 20 workers can bear: then there
is hardly room anywhere, which a job with the paper's scale-out would not come to.

A seed also gives the order in which bins are numbered, on which `baseline` and `even` depend. `exact` is `correlated`
with a grain of 0, which is algorithm 3 to the letter.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Table

from millstream.protocol.allocation import balanced, baseline, correlated, even, usable
from millstream.protocol.loads import Allocation, Floats, Loads, Moment, Numbers, Share

OVERLOAD = 0.7
NOISE = 0.05

WAYS: dict[str, Callable[[Loads], Allocation]] = {
    "baseline": baseline,
    "even": even,
    "correlated": correlated,
    "exact": partial(correlated, grain=0.0),
    "spread 4": partial(correlated, spread=4.0),
}
TARGET, AIM = 2.0, 3.0


@dataclass(frozen=True)
class Job:
    """The load of each bin in every period, its worker at first, and the load of each worker that is not of bins."""

    load: Floats
    primary: Numbers
    other: Floats
    statistics: int
    again: int = 0
    """After how many periods replicas are placed again, by the last ones; never, if 0."""
    moves: bool = True
    """Whether load is balanced."""

    def shuffled(self, rng: np.random.Generator) -> Job:
        """The same with bins in another order."""
        order = rng.permutation(len(self.primary))
        return replace(self, load=self.load[order], primary=self.primary[order])


def simulated(job: Job, way: Callable[[Loads], Allocation]) -> tuple[Share, Share]:
    """The share of moves that are assisted, and of replicas that are usable."""
    workers, primary = len(job.other), job.primary.astype(np.int32)
    capacity = np.full(workers, OVERLOAD)
    assisted, fit = Share(), Share()
    for period in range(job.statistics, job.load.shape[1]):
        later = period - job.statistics
        if not later or (job.again and later % job.again == 0):
            known = slice(later, period)
            allocation = way(Loads(job.load[:, known], primary, workers, other=job.other[:, known]))
        moment = Moment(job.load[:, period], primary, allocation, capacity, job.other[:, period])
        fit += usable(moment)
        if job.moves:
            moment, moved = balanced(moment)
            assisted += moved
            primary, allocation = moment.primary, moment.allocation
    return assisted, fit


# -- the pair ---------------------------------------------------------------------------------------------------------


def pair(seed: int) -> Job:
    """Two operators; what one gains, the other loses."""
    rng = np.random.default_rng(seed)
    bins, seconds, whole, external = 10, 100, 0.5, OVERLOAD
    gone = np.arange(seconds) / seconds
    shares = np.concatenate([np.tile(1 - gone, (bins, 1)), np.tile(gone, (bins, 1))]) / bins
    other = np.tile(np.array([[external], [0.0], [external]]), (1, seconds))
    job = Job(whole * shares * _measured(rng, shares.shape), np.repeat([1, 2], bins), other, 30)
    return job.shuffled(rng)


def _measured(rng: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    return rng.lognormal(0, NOISE, shape)


# -- the airline job --------------------------------------------------------------------------------------------------

PERIOD_S = 30
STATISTICS, PERIODS = 15 * 60 // PERIOD_S, 48 * 60 // PERIOD_S
RECORDS = 8_000 * PERIOD_S
SAMPLED = 16 * 5 * PERIOD_S
FLIGHTS = 67_328_899 // 3653
AIRLINES, AIRPORTS, HUBS, AIRPLANES = 20, 300, 4, 5_000
ZONES = (0.45, 0.30, 0.10, 0.15)
"""How many airports are in each time zone, from east to west."""
HOURS = (1, 0.5, 0.3, 0.3, 0.5, 3, 7, 7, 7, 6.5, 6.5, 6.5, 6.5, 6.5, 6.5, 6.5, 7, 7, 7, 6, 5, 4, 3, 2)
"""How many flights leave in each local hour of the day."""
DRIFT, DELAYED = 0.2, 0.2
BUSY, SAMPLING = 16, 4


@dataclass(frozen=True)
class Airline:
    """What the airline job is run with: the headline, unless said otherwise."""

    groups: int = 48
    peak: float = 1.0
    key: str = "flight"
    rotates: bool = True
    drift: float = DRIFT
    inputs: int = 0
    again: int = 0
    moves: bool = True


@dataclass(frozen=True)
class Flights:
    """The timetable of a day: one row for each flight."""

    hour: Numbers
    airline: Numbers
    airport: Numbers
    airplane: Numbers


def timetable(rng: np.random.Generator) -> Flights:
    """A day's flights."""
    by_rank = [1 / np.arange(1, count + 1) for count in (AIRLINES, AIRPORTS)]
    of_airlines, of_airports = (sizes / sizes.sum() for sizes in by_rank)
    zone = rng.choice(len(ZONES), AIRPORTS, p=ZONES)
    hubs = np.stack([rng.choice(AIRPORTS, HUBS, replace=False, p=of_airports) for _ in range(AIRLINES)])
    owner = np.sort(rng.choice(AIRLINES, AIRPLANES, p=of_airlines))
    owner[:AIRLINES] = np.arange(AIRLINES)  # each has one at least
    airplane = rng.integers(0, AIRPLANES, FLIGHTS)
    airline = owner[airplane]
    from_hub = rng.random(FLIGHTS) < 0.5
    hub = hubs[airline, rng.integers(0, HUBS, FLIGHTS)]
    airport = np.where(from_hub, hub, rng.choice(AIRPORTS, FLIGHTS, p=of_airports))
    local = rng.choice(24, FLIGHTS, p=np.array(HOURS) / sum(HOURS))
    return Flights((local + zone[airport]) % 24, airline, airport, airplane)


def airline(seed: int, given: Airline) -> Job:
    """The load of four operators over 48 minutes."""
    rng = np.random.default_rng(seed)
    flights = timetable(rng)
    busy = _drifting(rng, given.drift)
    key = {"flight": np.arange(FLIGHTS), "airport": flights.airport, "airplane": flights.airplane}[given.key]
    expected = RECORDS * 24 / FLIGHTS
    of_key = _per_group(flights, key, given.groups, rng, given.rotates and given.key == "airplane")
    of_airplane = _per_group(flights, flights.airplane, given.groups, rng, given.rotates)
    hours = np.arange(PERIODS) % 24
    records = [
        rng.poisson(expected * share * np.einsum("ap,apg->gp", busy, counts[:, hours]))
        for counts, share in ((of_key, 1.0), (of_airplane, DELAYED), (of_airplane, 1.0))
    ]
    sampled = rng.poisson(SAMPLED / given.groups, (given.groups, PERIODS))
    work = np.concatenate([*records, sampled]) * _measured(rng, (4 * given.groups, PERIODS))
    daily = np.bincount(flights.hour, minlength=24)
    most = expected * daily.max() * (2 + DELAYED)
    unit = given.peak * OVERLOAD * BUSY / most
    group = np.arange(given.groups)
    primary = np.concatenate([*[group % BUSY] * 3, BUSY + group % SAMPLING])
    reading = OVERLOAD * daily[np.arange(PERIODS) % 24] / daily.max()
    other = np.concatenate([np.zeros((BUSY + SAMPLING, PERIODS)), np.tile(reading, (given.inputs, 1))])
    return Job(work * unit, primary, other, STATISTICS, given.again, given.moves).shuffled(rng)


def _drifting(rng: np.random.Generator, drift: float) -> Floats:
    """How busy each airline is in each period: 1 in the mean, near to what it was in the period before."""
    stays = 0.8
    logs = np.empty((AIRLINES, PERIODS))
    logs[:, 0] = rng.normal(0, drift, AIRLINES)
    for period in range(1, PERIODS):
        logs[:, period] = stays * logs[:, period - 1] + rng.normal(0, drift * (1 - stays**2) ** 0.5, AIRLINES)
    return np.exp(logs - drift**2 / 2)


def _per_group(flights: Flights, key: Numbers, groups: int, rng: np.random.Generator, rotates: bool) -> Floats:
    """How many flights of each airline leave in each hour, by the group that their key hashes to.

    If airplanes rotate, each flies at all hours at which its airline does.
    """
    group = rng.integers(0, groups, int(key.max()) + 1)[key]
    counts = np.zeros((AIRLINES, 24, groups))
    np.add.at(counts, (flights.airline, flights.hour, group), 1)
    if rotates:
        hourly, grouped = counts.sum(axis=2, keepdims=True), counts.sum(axis=1, keepdims=True)
        counts = hourly * grouped / np.maximum(hourly.sum(axis=1, keepdims=True), 1)
    return counts


# -- what comes of it -------------------------------------------------------------------------------------------------

Row = dict[str, Any]
VARIANTS = {
    "peak at 90 %": Airline(peak=0.9),
    "peak at 110 %": Airline(peak=1.1),
    "peak at 120 %": Airline(peak=1.2),
    "operator 1 by airport": Airline(key="airport"),
    "operator 1 by airplane": Airline(key="airplane"),
    "airplanes keep their hours": Airline(rotates=False),
    "airlines do not drift": Airline(drift=0.0),
    "4 input workers hold replicas": Airline(inputs=4),
    "placed again every 15 minutes": Airline(again=STATISTICS),
    "nothing moves": Airline(moves=False),
    "as it was at first": Airline(peak=0.95 * (BUSY + SAMPLING) / BUSY, rotates=False),
}


def measure(groups: Sequence[int], seeds: int, variants: bool = True) -> list[Row]:
    """One row for each experiment, seed and way to allocate."""
    jobs: list[tuple[str, Callable[[int], Job]]] = [("pair", pair)]
    jobs += [(f"airline, {count} bins", partial(airline, given=Airline(groups=count))) for count in groups]
    if variants:
        most = max(groups)
        some = [(name, replace(given, groups=most)) for name, given in VARIANTS.items()]
        jobs += [(f"airline, {name}", partial(airline, given=given)) for name, given in some]
    rows = []
    for name, make in jobs:
        for seed in range(seeds):
            job = make(seed)
            for way, allocate in WAYS.items():
                assisted, fit = simulated(job, allocate)
                row: Row = {"job": name, "seed": seed, "way": way}
                row |= {"assisted": assisted.ratio, "moves": assisted.whole}
                row |= {"usable": fit.ratio, "replicas": fit.whole}
                rows.append(row)
    return rows


def timed(bins: int, workers: int, periods: int = 32) -> Row:
    """The seconds that each way takes, and the most memory that this process has had."""
    rng = np.random.default_rng(0)
    primary = rng.integers(0, workers, bins, dtype=np.int32)
    tides = 1.5 + np.sin(2 * np.pi * (np.arange(periods) / periods + np.arange(workers)[:, None] / workers))
    history = tides[primary] * rng.uniform(0.5, 2, (bins, 1)) * _measured(rng, (bins, periods))
    found: Row = {"bins": bins, "workers": workers, "periods": periods, "seconds": {}}
    ways = WAYS | {"spread 1.05": partial(correlated, spread=1.05)}
    for way, allocate in ways.items():
        begun = time.process_time(), time.perf_counter()
        allocate(Loads(history, primary, workers))
        found["seconds"][way] = time.process_time() - begun[0], time.perf_counter() - begun[1]
    found["peak_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


def ratios(rows: Sequence[Row], job: str, what: str, way: str, than: str = "even") -> list[float]:
    """How many times better one way is than another, seed by seed."""
    of = {(row["way"], row["seed"]): row[what] for row in rows if row["job"] == job}
    seeds = sorted({seed for _, seed in of})
    return [of[way, seed] / of[than, seed] if of[than, seed] else float("inf") for seed in seeds]


def _told(values: Sequence[float], form: Callable[[float], str]) -> str:
    known = [value for value in values if not np.isnan(value)]
    if not known:
        return "-"
    return f"{form(float(np.median(known)))} ({form(min(known))} to {form(max(known))})"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _times(value: float) -> str:
    return f"{value:.1f}x"


def show(console: Console, rows: Sequence[Row], seeds: int) -> None:
    """The table: for each job and way the median and the range over seeds."""
    table = Table(title=f"median (range) of {seeds} seeds", title_justify="left")
    for name in ("job", "allocation", "moves", "assisted moves", "usable replicas", "usable, to even"):
        table.add_column(name, justify="left" if name in ("job", "allocation") else "right")
    for job in dict.fromkeys(row["job"] for row in rows):
        for at, way in enumerate(WAYS):
            mine = [row for row in rows if row["job"] == job and row["way"] == way]
            moves = float(np.median([row["moves"] for row in mine]))
            shares = [_told([row[what] for row in mine], _percent) for what in ("assisted", "usable")]
            than = _told(ratios(rows, job, "usable", way), _times) if way not in ("baseline", "even") else ""
            table.add_row(job if not at else "", way, f"{moves:.0f}", *shares, than)
        table.add_section()
    console.print(table)
    for job in dict.fromkeys(row["job"] for row in rows if row["job"] != "pair"):
        found = float(np.median(ratios(rows, job, "usable", "correlated")))
        verdict = "aim reached" if found >= AIM else "reached" if found >= TARGET else "missed"
        console.print(
            f"{job}: correlated has {found:.2f} times the usable replicas of even; "
            f"at least {TARGET:g}, aim {AIM:g}: {verdict}",
            highlight=False,
        )


def show_times(console: Console, found: Row) -> None:
    """The seconds of each way."""
    size = f"{found['bins']:,} bins, {found['workers']:,} workers, {found['periods']} periods"
    table = Table(title=size, title_justify="left")
    for name in ("allocation", "processor, s", "elapsed, s"):
        table.add_column(name, justify="left" if name == "allocation" else "right")
    for way, (used, elapsed) in found["seconds"].items():
        table.add_row(way, f"{used:.1f}", f"{elapsed:.1f}")
    console.print(table)
    console.print(f"most memory of the process: {found['peak_bytes'] / 1e6:,.0f} MB", highlight=False)


@click.command()
@click.option("--groups", default="16,32,48", show_default=True, help="Bins per operator of the airline job.")
@click.option("--seeds", default=15, show_default=True, help="How many times, each with other loads.")
@click.option("--bins", default=100_000, show_default=True, help="Bins that are timed.")
@click.option("--workers", default=1_000, show_default=True, help="Workers that are timed.")
@click.option("--variants/--no-variants", default=True, help="Also without each of the assumptions.")
@click.option("--json", "file", type=click.Path(path_type=Path, dir_okay=False), help="Write all numbers there.")
def main(groups: str, seeds: int, bins: int, workers: int, variants: bool, file: Path | None) -> None:
    """Measure how often replicas are where moves need them, and how long allocation takes."""
    console = Console(width=130)
    rows = measure([int(count) for count in groups.split(",")], seeds, variants)
    show(console, rows, seeds)
    scale = timed(bins, workers)
    show_times(console, scale)
    if file is not None:
        file.write_text(json.dumps({"seeds": seeds, "rows": rows, "scale": scale}, indent=1) + "\n")


if __name__ == "__main__":
    main()
