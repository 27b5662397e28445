"""Which searches spike, and which dip? After section 2 of the MillWheel paper: python examples/zeitgeist.py

A dip is what does not come: it takes a low watermark to tell what is missing from what is only late."""

from datetime import timedelta

import inputs
import millstream as ms

SEARCHES, SECOND = "query string, ts timestamp", timedelta(seconds=1)


class WindowCounter(ms.Computation):
    """How often a query was searched in each second, also in those without a search."""

    counts = ms.Map("timestamp", "long", default=0)  # by the end of the second
    complete = ms.Timer(ms.EVENT_TIME)
    output = "query string, second timestamp, searches long"

    def on_record(self, search, at):
        end = at.time.replace(microsecond=0) + SECOND
        self.counts.set(end, self.counts.get(end) + 1)
        self.complete.set(min(end, self.complete.get() or end))

    @complete.fires
    def report(self, at):
        yield at.key, at.time, self.counts.get(at.time)
        self.counts.delete(at.time)
        self.complete.set(at.time + SECOND)


class ModelCalculator(ms.Computation):
    """What the next second should bring: an average that forgets slowly."""

    average = ms.Value("double")
    output = "query string, second timestamp, expected double"

    def on_record(self, window, at):
        before = self.average.get()
        self.average.set(window.searches if before is None else 0.95 * before + 0.05 * window.searches)
        yield at.key, window.second + SECOND, self.average.get()


class Detector(ms.Computation):
    """Compares the searches of a second with those expected, and reports three odd seconds in a row."""

    expected = ms.Map("timestamp", "double")
    odd = ms.Value("long", default=0)  # seconds in a row with too many searches or, below zero, with too few
    outputs = dict.fromkeys(("spikes", "dips"), "query string, second timestamp, searches long, expected double")

    def on_record(self, row, at):
        if at.input == "model":
            self.expected.set(row.second, row.expected)
        elif self.expected.exists(row.second):
            due = self.expected.get(row.second)
            way = (row.searches > 2 * due) - (row.searches < due / 2)
            self.odd.set(self.odd.get() + way if self.odd.get() * way > 0 else way)
            if abs(self.odd.get()) == 3:
                yield ms.to("spikes" if way > 0 else "dips", at.key, row.second, row.searches, round(due, 1))
            self.expected.delete(row.second)


def build(searches, folder):
    query = ms.Query("zeitgeist")
    searched = query.source("searches", searches, event_time="ts", lateness="2 seconds")
    windows = searched.key_by("query").compute("counter", WindowCounter)
    model = windows.key_by("query").compute("model", ModelCalculator)
    odd = query.compute("detector", Detector, model=model.key_by("query"), windows=windows.key_by("query"))
    odd.output("spikes").sink("spikes_out", ms.Parquet(f"{folder}/spikes"))
    odd.output("dips").sink("dips_out", ms.Parquet(f"{folder}/dips"))
    return query


if __name__ == "__main__":
    folder = inputs.write(inputs.searches())
    spark = ms.session("zeitgeist", settings={"spark.sql.session.timeZone": "UTC"})
    query = build(lambda read: read.schema(SEARCHES).option("maxFilesPerTrigger", 1).csv(f"{folder}/in"), folder)
    query.start(spark, store=f"{folder}/store", trigger={"availableNow": True}).await_termination()
    spark.read.parquet(f"{folder}/spikes", f"{folder}/dips").orderBy("second").show()
