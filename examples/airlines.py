"""Delays of planes, year by year, from flights shaped like the On-Time data: python examples/airlines.py

All of it on whole columns. A map extracts delays, a step adds them up for each plane and year, and when a year is over,
a last one finds the worst plane. Beside them, a step without an output keeps how long each plane has been in the air.
"""

import pyarrow.compute as pc

import inputs
import millstream as ms

FLIGHTS = "FlightDate timestamp, TailNum string, Origin string, Dest string, ArrDelay int, AirTime int, Cancelled int"
DELAYS = "FlightDate timestamp, TailNum string, Year int, Delay int, AirTime int"


def extract(flights):
    """Flights that took place, their year, and their delay: early is not late."""
    flown = flights.filter(pc.and_(pc.equal(flights["Cancelled"], 0), pc.is_valid(flights["TailNum"])))
    flown = flown.append_column("Year", pc.year(flown["FlightDate"]).cast("int32"))
    flown = flown.append_column("Delay", pc.max_element_wise(flown["ArrDelay"], 0).cast("int32"))
    return flown.select(["FlightDate", "TailNum", "Year", "Delay", "AirTime"])


class PlaneYear(ms.Computation):
    """Adds up the flights and delays of a plane in a year, until the year is over."""

    flights, minutes = ms.Value("long", default=0), ms.Value("long", default=0)
    over = ms.Timer(ms.EVENT_TIME)
    output = "plane string, year int, flights long, minutes long"

    def on_batch(self, batch):
        self.flights.write(batch, self.flights.read(batch) + batch.count())
        self.minutes.write(batch, self.minutes.read(batch) + batch.sum("Delay"))
        self.over.set(batch, (batch.key_columns[1].to_numpy() - 1970 + 1).astype("datetime64[Y]"))

    @over.fires
    def report(self, batch):
        yield batch.output(*batch.key_columns, self.flights.read(batch), self.minutes.read(batch))
        self.flights.delete(batch)
        self.minutes.delete(batch)


class Worst(ms.Computation):
    """The plane with the most delay. Timers of all planes are due at the same time, so a year comes in one epoch."""

    output = "year int, planes long, plane string, flights long, minutes long"

    def on_batch(self, batch):
        worst = batch.rows.to_pandas().sort_values(["minutes", "plane"]).groupby("year").last().loc[batch.keys.tolist()]
        yield batch.output(batch.keys, batch.count(), worst.plane, worst.flights, worst.minutes)


class InTheAir(ms.Computation):
    """Minutes in the air, of each plane. It yields nothing: state can be read."""

    minutes = ms.Value("long", default=0)

    def on_batch(self, batch):
        self.minutes.write(batch, self.minutes.read(batch) + batch.sum("AirTime"))


def build(flights, folder):
    query = ms.Query("airlines")
    arrived = query.source("flights", flights, event_time="FlightDate", lateness="14 days")
    delays = arrived.map_batches("delays", extract, output=DELAYS)
    years = delays.key_by("TailNum", "Year").compute("years", PlaneYear)
    years.key_by("year").compute("worst", Worst).sink("out", ms.Parquet(f"{folder}/worst"))
    delays.key_by("TailNum").compute("air", InTheAir)
    return query


if __name__ == "__main__":
    folder = inputs.write(inputs.flights())
    spark = ms.session("airlines", settings={"spark.sql.session.timeZone": "UTC"})
    query = build(lambda read: read.schema(FLIGHTS).option("maxFilesPerTrigger", 1).csv(f"{folder}/in"), folder)
    running = query.start(spark, store=f"{folder}/store", trigger={"availableNow": True})
    running.await_termination()
    spark.read.parquet(f"{folder}/worst").orderBy("year").show()
    running.state("air").orderBy("minutes", ascending=False).show(3)
