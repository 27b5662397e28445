"""Sessions of payment cards, and alerts while they last: python examples/fraud.py

Payments arrive out of order. So each becomes a timer that is due at its own time: the timers of a card fire in the
order of their times, once nothing earlier can come any more, and the rest of the code sees payments in perfect order.
"""

from datetime import timedelta

import inputs
import millstream as ms

PAYMENTS = "id long, card string, ts timestamp, amount double"
SILENCE, HASTE = timedelta(minutes=20), timedelta(minutes=1)


class Sessions(ms.Computation):
    """A card's session ends after some silence. What looks wrong is reported while it lasts."""

    session = ms.Value("struct<began: timestamp, payments: long, total: double>")
    recent = ms.Value("array<timestamp>", default=[])  # the last payments
    usual = ms.Value("double")  # the average amount: outlives sessions
    payment = ms.Timer(ms.EVENT_TIME, payload="double")
    silence = ms.Timer(ms.EVENT_TIME)
    output = "card string, began timestamp, ended timestamp, payments long, total double"
    outputs = {"alerts": "card string, ts timestamp, reason string", "rejected": PAYMENTS}

    def on_record(self, row, at):
        if (row.amount or 0) > 0:
            self.payment.set(at.time, tag=str(row.id), payload=row.amount)
        else:
            yield ms.to("rejected", row)

    @payment.fires
    def paid(self, at):
        amount, usual = at.payload, self.usual.get() or at.payload
        session = self.session.get() or {"began": at.time, "payments": 0, "total": 0.0}
        session["payments"] += 1
        session["total"] += amount
        self.session.set(session)
        self.recent.set([*self.recent.get()[-3:], at.time])
        self.usual.set(0.9 * usual + 0.1 * amount)
        self.silence.set(SILENCE)  # from now, which is the time of the payment; it moves with every one
        if amount > 10 * usual:
            yield ms.to("alerts", at.key, at.time, f"{amount:.2f} is far above the usual {usual:.2f}")
        if len(self.recent.get()) == 4 and at.time - self.recent.get()[0] < HASTE:
            yield ms.to("alerts", at.key, at.time, "four payments within a minute")
            self.recent.delete()

    @silence.fires
    def ended(self, at):
        session = self.session.get()
        yield at.key, session["began"], at.time - SILENCE, session["payments"], round(session["total"], 2)
        self.session.delete()
        self.recent.delete()


def build(payments, folder):
    query = ms.Query("fraud")
    paid = query.source("payments", payments, event_time="ts", lateness="5 minutes")
    sessions = paid.key_by("card").compute("sessions", Sessions, late="output")
    sessions.sink("sessions_out", ms.Parquet(f"{folder}/sessions"))
    for name in ("alerts", "rejected", "late"):
        sessions.output(name).sink(f"{name}_out", ms.Parquet(f"{folder}/{name}"))
    return query


if __name__ == "__main__":
    folder = inputs.write(inputs.payments())
    spark = ms.session("fraud", settings={"spark.sql.session.timeZone": "UTC"})
    query = build(lambda read: read.schema(PAYMENTS).option("maxFilesPerTrigger", 1).csv(f"{folder}/in"), folder)
    query.start(spark, store=f"{folder}/store", trigger={"availableNow": True}).await_termination()
    for name, order in (("sessions", "began"), ("alerts", "ts"), ("rejected", "ts"), ("late", "ts")):
        print(f"{name}:")
        spark.read.parquet(f"{folder}/{name}").orderBy(order).show(5, truncate=False)
