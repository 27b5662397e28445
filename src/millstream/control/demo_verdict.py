"""The verdict of `millstream demo`: what was found, and whether it proves what the demo is there to prove.

Rules
-----
- The counts are judged by the comparison of `demo_words`, which does not trust Millstream.
- A kill or a rescale that missed its moment is not passed off as a proof, even if the counts are right.
- Times are told and not judged: they are the machine's.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from millstream.control.demo_timeline import WARM_UP, Timeline
from millstream.control.demo_words import Comparison
from millstream.control.display import Display, Finding
from millstream.protocol.migration import size_text
from millstream.protocol.steering import Outcome


@dataclass(frozen=True, slots=True)
class Rescaled:
    """A rescale that was asked for, and what became of it."""

    slots: tuple[int, int]
    """Before it and after it, as they should be."""
    found: tuple[int, int]
    """As they were in the epoch before it, and in the last epoch that the demo knows of it."""
    asked_for: int
    """The epoch it was asked for at."""
    bins: int
    outcome: Outcome | None
    done_by_first: int
    """How many rounds the first driver had committed when it was killed."""

    @property
    def on_time(self) -> bool:
        """Whether it was carried out, from the epoch it was meant for on, and left the slots it should."""
        told = self.outcome
        done = told is not None and told.state == "done" and told.began == self.asked_for
        return done and self.found == self.slots

    def __str__(self) -> str:
        told = self.outcome
        if told is None:
            return "the driver has not heard it"
        if not self.on_time:
            why = f" ({told.reason})" if told.reason else ""
            return (
                f"{told.state}{why} after {told.done} of {told.rounds} rounds, from epoch {told.began} instead of "
                f"{self.asked_for}; {self.found[0]} slots before and {self.found[1]} after"
            )
        return (
            f"{self.slots[0]} to {self.slots[1]} slots in epochs {told.began} to {told.last}: {self.bins:,d} bins, "
            f"about {size_text(told.bytes)}, in {told.rounds} rounds"
        )


@dataclass(frozen=True, slots=True)
class Kill:
    """What was killed, and what came after."""

    epoch: int
    first_after: int
    """The first epoch that the second driver ran."""
    code: int
    processes: int
    """How many, the driver included."""
    to_session_s: float
    to_commit_s: float
    """From the kill to the new Spark session, and to the first commit."""

    @property
    def hit(self) -> bool:
        """Whether it was what it should be: by signal, and before the commit."""
        return self.code == -signal.SIGKILL and self.first_after == self.epoch

    def __str__(self) -> str:
        after = f"driver 2 ran epoch {self.first_after} again"
        if not self.hit:
            after = f"exit code {self.code}, and driver 2 began with epoch {self.first_after}"
        return f"{self.processes} processes, in epoch {self.epoch} before its commit; {after}"


@dataclass(frozen=True, slots=True)
class Result:
    """Everything the verdict tells. `live` is the rescale that was left alone, `cut` the one that was killed."""

    comparison: Comparison
    live: Rescaled
    cut: Rescaled
    kill: Kill
    timeline: Timeline
    total_s: float

    @property
    def exact(self) -> bool:
        """Whether the counts are right, and everything hit its moment."""
        return self.comparison.exact and self.kill.hit and self.live.on_time and self._cut_between_rounds

    @property
    def _cut_between_rounds(self) -> bool:
        told = self.cut.outcome
        return self.cut.on_time and told is not None and 0 < self.cut.done_by_first < told.rounds

    def tell(self, display: Display) -> None:
        """Tells the verdict."""
        found = self.comparison
        records = found.expected.total()
        if self.exact:
            headline = f"All {records:,d} records were counted exactly once, across two rescales and a SIGKILL."
        elif found.exact:
            headline = "The counts are right, but a rescale or the kill did not hit the moment it was meant for."
        else:
            headline = "The counts differ from a sequential count of the same text."
        display.verdict(self.exact, headline, [*self._counts(), *self._happenings()])

    def _counts(self) -> list[Finding]:
        found = self.comparison
        records, distinct = found.expected.total(), len(found.expected)
        top = found.expected.most_common(1)[0][0]
        return [
            Finding("sequential count", f"{records:,d} records, {distinct:,d} distinct words"),
            Finding(
                "state",
                f"{sum(found.state.values()):,d} records, {len(found.state):,d} distinct words, "
                + _wrong_words(found.state_wrong),
                not found.state_wrong,
            ),
            Finding(
                "Parquet sink",
                f"{found.sink_rows:,d} rows: the totals 1, 2, ... n of {len(found.sink):,d} words, "
                + _wrong_words(found.sink_wrong),
                not found.sink_wrong,
            ),
            Finding(
                "for example",
                f"{top!r}: {found.expected[top]:,d} counted, {found.state.get(top, 0):,d} in the state, "
                f"{found.sink.get(top, 0):,d} in the sink",
            ),
        ]

    def _happenings(self) -> list[Finding]:
        done, kill = self.cut.done_by_first, self.kill
        by_whom = f"driver 1 had done {done} of them, driver 2 did the rest"
        if self.cut.on_time and not self._cut_between_rounds:
            by_whom = f"driver 1 had done {done} of them when it was killed, which is not in its middle"
        return [
            Finding("live rescale", str(self.live), self.live.on_time),
            Finding("epoch times", self._times()),
            Finding("killed rescale", f"{self.cut}; {by_whom}", self._cut_between_rounds),
            Finding("SIGKILL", str(kill), kill.hit),
            Finding(
                "recovery",
                f"{kill.to_commit_s:.1f} s from the kill to the next commit, {kill.to_session_s:.1f} s of it "
                "until Spark was up",
            ),
            Finding("altogether", f"{len(self.timeline.epochs)} epochs, {self.total_s:.0f} s"),
        ]

    def _times(self) -> str:
        """The longest epochs before, during and after the live rescale; the two neighbours are the steady state."""
        told = self.live.outcome
        if told is None or told.began < 0:
            return "not known: nothing was moved"
        longest = self.timeline.longest_ms
        spans = {
            "before the live rescale": longest(0, told.began - 1),
            "during it": longest(told.began, told.last),
            "after it": longest(told.last + 1, self.cut.asked_for - 1),
        }
        parts = [f"{'-' if ms is None else f'{ms:,.0f} ms'} {name}" for name, ms in spans.items()]
        return f"at most {', '.join(parts)} (without the first {WARM_UP} epochs of a JVM)"


def _wrong_words(words: list[str]) -> str:
    if not words:
        return "none wrong"
    return f"{len(words):,d} wrong, such as {', '.join(repr(word) for word in words[:3])}"
