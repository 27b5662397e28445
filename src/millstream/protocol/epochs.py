"""The life of an epoch: what the journal says, what may be done next, and whether an attempt counts.

Rules
-----
- Exactly one commit names each epoch, and epochs are committed in order without a gap (G1).
- An attempt is planned before it runs and ended (committed or aborted) before the next one is planned.
- An attempt is committed only if every slot reported, no user code failed, and all consumers saw the same output of
  each producer: the receipts agree (G1, G2). A task that Spark ran twice cannot mix two versions into one commit.
- The journal is bound to one Spark query and to the offsets of every epoch. What does not fit is refused, never
  skipped: a record that Spark replays is either already in the state, or goes into it (G6).

`TRANSITIONS` is the state machine of the journal; `docs/architecture.md` holds the diagram made from it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, NewType

from millstream.errors import InvariantViolation, UserError
from millstream.protocol.manifest import Edit, Manifest, SegmentRef
from millstream.protocol.modification import Applied, Changed, followed
from millstream.protocol.routing import RoutingTable
from millstream.protocol.steering import Outcome, remembered
from millstream.protocol.time import END_OF_TIME, NO_TIME, SourceClock

Epoch = NewType("Epoch", int)
Attempt = NewType("Attempt", int)
Generation = NewType("Generation", int)

NO_EPOCH = Epoch(-1)
"""What is committed before the first epoch."""


# -- what the journal holds ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """A driver takes the store over; any driver of a lower generation stops. `owner` is its host and process, and
    `beat_s` the time between two epochs when there is nothing to do. `fetch_limit` is what its workers may
    fetch in a second, in bytes; 0 is no limit."""

    generation: Generation
    owner: str
    fetch_limit: int = 0
    beat_s: float = 1.0


@dataclass(frozen=True, slots=True)
class Plan:
    """What an attempt of an epoch runs. `graph` and `tables` are given only when they change.

    `clock_ms` never goes back. `idle` are the sources that hold no watermark back in this epoch, `leaving` the
    partitions of each source that hold it back no longer, and `stated` the watermarks that come from elsewhere than the
    records. `outcomes` are of the commands whose state it changes, and
    `control` is how far the control log has been heard. `changed` is there if the graph is another than before.
    """

    epoch: Epoch
    attempt: Attempt
    spark_query: str
    offsets: str
    clock_ms: int
    code: dict[str, str]
    graph: dict[str, Any] | None = None
    tables: dict[str, RoutingTable] = field(default_factory=dict)
    edits: tuple[Edit, ...] = ()
    idle: tuple[str, ...] = ()
    leaving: dict[str, tuple[str, ...]] = field(default_factory=dict)
    stated: dict[str, int] = field(default_factory=dict)
    outcomes: tuple[Outcome, ...] = ()
    control: int = 0
    changed: Changed | None = None
    spark_offsets: bytes = b""
    """What Spark's checkpoint holds of the offsets, compressed, so that it can be mended."""


@dataclass(frozen=True, slots=True)
class Abort:
    """An attempt is over and leaves nothing."""

    epoch: Epoch
    attempt: Attempt
    reason: str


class LateCount(NamedTuple):
    """How many records were late for a step, how many for some of their windows only, and how many windows all of them
    missed."""

    records: int = 0
    partly: int = 0
    windows: int = 0

    def __add__(self, other: object) -> LateCount:
        if not isinstance(other, LateCount):
            return NotImplemented
        return LateCount(self.records + other.records, self.partly + other.partly, self.windows + other.windows)


@dataclass(frozen=True, slots=True)
class Output:
    """A stored object of productions of one stream, made by one slot; if it is fed back, with its least event time."""

    stream: str
    slot: int
    name: str
    rows: int
    bytes: int
    digest: str
    least_time: int | None = None


@dataclass(frozen=True, slots=True)
class Commit:
    """The one entry that makes an epoch real. Epochs before `oldest` are given up: their objects may be deleted.

    `edits` are of segments that the epoch's own writes took up; those of compactions are in the plan. `clocks` are of
    the sources and `watermarks` of the steps, after the epoch; `late` and `dead_letters` count records of each step.
    `passed` are the watermarks that steps with holds have passed on. `workers` are the slots that were placed on each
    worker, told only when that has changed. `samples` are a few records of some sources, told now and then.
    """

    epoch: Epoch
    attempt: Attempt
    added: tuple[SegmentRef, ...]
    edits: tuple[Edit, ...]
    outputs: tuple[Output, ...]
    records: dict[str, int]
    oldest: Epoch
    clocks: dict[str, SourceClock] = field(default_factory=dict)
    watermarks: dict[str, int] = field(default_factory=dict)
    late: dict[str, LateCount] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    workers: dict[str, tuple[int, ...]] | None = None
    samples: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    loads: dict[str, bytes] = field(default_factory=dict)
    """What each step had to do, in parts of the key space, packed (see `protocol.statistics`)."""
    took_ms: int = 0
    """How long the epoch took, from its first plan to this."""
    replicas: dict[int, tuple[str, ...]] | None = None
    """The workers that hold replicas of each slot, but for what was just written; told only when that has changed."""
    rates: dict[str, float] | None = None
    """The bytes in a second that a worker has been seen to get from the `store`, and from another as a `replica`; told
    only when they are others than before."""
    idle: tuple[str, ...] | None = None
    """The workers that have no slots, told only when that has changed."""


Entry = Claim | Plan | Abort | Commit

# (state, entry) -> state. "resting": the last planned attempt has ended. "running": one has been planned.
TRANSITIONS: dict[tuple[str, str], str] = {
    ("resting", "Claim"): "resting",
    ("resting", "Plan"): "running",
    ("running", "Commit"): "resting",
    ("running", "Abort"): "resting",
    ("running", "Claim"): "running",
}


# -- what the entries add up to --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Committed:
    """What is remembered of a retained epoch."""

    offsets: str
    outputs: tuple[Output, ...]
    records: dict[str, int]


@dataclass(frozen=True, slots=True)
class History:
    """The sum of the journal: a fold over its entries, and the content of a snapshot."""

    generation: Generation = Generation(0)
    spark_query: str | None = None
    graph: dict[str, Any] | None = None
    tables: dict[str, RoutingTable] = field(default_factory=dict)
    epoch: Epoch = NO_EPOCH
    oldest: Epoch = NO_EPOCH
    manifest: Manifest = field(default_factory=Manifest)
    released: dict[str, Epoch] = field(default_factory=dict)
    recent: dict[Epoch, Committed] = field(default_factory=dict)
    attempts: int = 0
    plan: Plan | None = None
    clock_ms: int = 0
    clocks: dict[str, SourceClock] = field(default_factory=dict)
    watermarks: dict[str, int] = field(default_factory=dict)
    late: dict[str, LateCount] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    control: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)
    workers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    fetch_limit: int = 0
    owner: str = ""
    """Host and process of the newest driver."""
    beat_s: float = 1.0
    modified: tuple[Applied, ...] = ()
    samples: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    took_ms: int = 0
    replicas: dict[int, tuple[str, ...]] = field(default_factory=dict)
    rates: dict[str, float] = field(default_factory=dict)
    idle: tuple[str, ...] = ()
    written: int = 0
    """The bytes of state that an epoch with records writes: a mean, in which recent ones count more."""
    tried: dict[int, int] = field(default_factory=dict)
    """How often the first epoch of a modification that is under way has been planned, by the command's number."""
    spark_offsets: dict[Epoch, bytes] = field(default_factory=dict)
    """What Spark's checkpoint holds of the offsets of the last two epochs, compressed."""

    @property
    def version(self) -> int:
        """That of the graph: how often it has been modified."""
        return len(self.modified)

    @property
    def last_outputs(self) -> tuple[Output, ...]:
        """The stored productions of the last committed epoch."""
        return self.recent[self.epoch].outputs if self.epoch in self.recent else ()

    def after(self, entry: Entry) -> History:
        """The history with one more entry."""
        state = "resting" if self.plan is None else "running"
        if (state, type(entry).__name__) not in TRANSITIONS:
            raise InvariantViolation(f"journal entry {type(entry).__name__} cannot follow while {state}")
        match entry:
            case Claim():
                if entry.generation <= self.generation:
                    raise InvariantViolation(f"claim {entry.generation} after claim {self.generation}")
                return replace(
                    self,
                    generation=entry.generation,
                    fetch_limit=entry.fetch_limit,
                    owner=entry.owner,
                    beat_s=entry.beat_s,
                )
            case Plan():
                if entry.epoch != self.epoch + 1 or entry.attempt != self.attempts:
                    raise InvariantViolation(
                        f"plan {entry.epoch}.{entry.attempt} found, {self.epoch + 1}.{self.attempts} expected"
                    )
                if entry.clock_ms < self.clock_ms:
                    raise InvariantViolation(f"the clock of a plan goes back from {self.clock_ms} to {entry.clock_ms}")
                if entry.control < self.control:
                    raise InvariantViolation(f"a plan hears command {entry.control} again, {self.control} is next")
                tried = self.tried
                if entry.changed is not None:
                    number = entry.changed.number
                    tried = {**tried, number: tried.get(number, 0) + 1}
                return replace(self, plan=entry, attempts=self.attempts + 1, tried=tried)
            case Abort():
                self._ends_plan(entry)
                return replace(self, plan=None)
            case Commit():
                return self._committed(self._ends_plan(entry), entry)

    def followed(self, changed: Changed) -> History:
        """The same, with steps called otherwise, or taken out. Sources that come or go have no time."""
        steps = changed.steps
        return replace(
            self,
            clocks={name: clock for name, clock in self.clocks.items() if name not in changed.sources},
            samples={name: few for name, few in self.samples.items() if name not in changed.sources},
            tables=followed(self.tables, steps),
            watermarks=followed(self.watermarks, steps),
            late=followed(self.late, steps),
            dead_letters=followed(self.dead_letters, steps),
            passed=followed(self.passed, steps),
        )

    def _ends_plan(self, entry: Abort | Commit) -> Plan:
        if self.plan is None or (self.plan.epoch, self.plan.attempt) != (entry.epoch, entry.attempt):
            raise InvariantViolation(f"{entry.epoch}.{entry.attempt} ends an attempt that was not planned")
        return self.plan

    def _committed(self, plan: Plan, commit: Commit) -> History:
        if not self.oldest <= commit.oldest <= commit.epoch:
            raise InvariantViolation(f"epoch {commit.epoch} gives up epochs before {commit.oldest}, not {self.oldest}")
        manifest, dropped = planned_manifest(self, plan)
        manifest, more = manifest.edited(commit.edits)
        dropped += more
        before = self if plan.changed is None else self.followed(plan.changed)
        for known, marks in ((before.watermarks, commit.watermarks), (before.passed, commit.passed)):
            for name, mark in marks.items():
                if mark < known.get(name, NO_TIME):
                    raise InvariantViolation(f"the watermark of {name} goes back from {known[name]} to {mark}")
        released = {name: at for name, at in self.released.items() if at > commit.oldest}
        released.update(dict.fromkeys(dropped, commit.epoch))
        recent = {at: what for at, what in self.recent.items() if at >= commit.oldest}
        recent[commit.epoch] = Committed(plan.offsets, commit.outputs, commit.records)
        outcomes = remembered(self.outcomes, plan.outcomes)
        return replace(
            self,
            spark_query=plan.spark_query,
            graph=plan.graph if plan.graph is not None else self.graph,
            tables={**before.tables, **plan.tables},
            epoch=commit.epoch,
            oldest=commit.oldest,
            manifest=manifest.added(commit.added),
            released=released,
            recent=recent,
            attempts=0,
            plan=None,
            clock_ms=plan.clock_ms,
            clocks={**before.clocks, **commit.clocks},
            watermarks={**before.watermarks, **commit.watermarks},
            late=_late_together([before.late, commit.late]),
            dead_letters=_sums([before.dead_letters, commit.dead_letters]),
            passed={**before.passed, **commit.passed},
            control=plan.control,
            outcomes=outcomes,
            workers=self.workers if commit.workers is None else commit.workers,
            modified=self.modified if plan.changed is None else (*self.modified, _applied(plan.changed, plan.epoch)),
            samples={**before.samples, **commit.samples},
            took_ms=commit.took_ms,
            replicas=self.replicas if commit.replicas is None else commit.replicas,
            rates=self.rates if commit.rates is None else commit.rates,
            idle=self.idle if commit.idle is None else commit.idle,
            spark_offsets={
                **{epoch: data for epoch, data in self.spark_offsets.items() if epoch >= commit.epoch - 1},
                **({commit.epoch: plan.spark_offsets} if plan.spark_offsets else {}),
            },
            written=_mean(self.written, sum(segment.bytes for segment in commit.added), any(commit.records.values())),
            tried={
                number: count
                for number, count in self.tried.items()
                if number in outcomes and not outcomes[number].over
            },
        )


def _mean(before: int, now: int, busy: bool) -> int:
    """Epochs that only let time pass do not count."""
    return before if not busy else (before + now) // 2 if before else now


def planned_manifest(history: History, plan: Plan) -> tuple[Manifest, tuple[str, ...]]:
    """The manifest that an attempt runs on: after the plan's edits and its change of the graph; and the segments that
    no longer count."""
    manifest, dropped = history.manifest.edited(plan.edits)
    if plan.changed is not None:
        manifest, more = manifest.transferred(dict(plan.changed.families))
        dropped += more
    return manifest, dropped


def _applied(changed: Changed, epoch: Epoch) -> Applied:
    return Applied(
        changed.number,
        changed.code,
        epoch,
        changed.before,
        changed.after,
        changed.text,
        changed.replaced,
        changed.touched,
        changed.inverse,
        changed.forms,
        {**changed.steps, **dict.fromkeys(changed.maps)},
        changed.sources,
    )


def _late_together(counts: Iterable[Mapping[str, LateCount]]) -> dict[str, LateCount]:
    """Late records by step, added up."""
    total: dict[str, LateCount] = {}
    for each in counts:
        for step, count in each.items():
            total[step] = total.get(step, LateCount()) + count
    return total


def _sums(counts: Iterable[Mapping[str, int]]) -> dict[str, int]:
    """Counts by step, added up."""
    total: Counter[str] = Counter()
    for each in counts:
        total.update(each)
    return dict(total)


# -- may this epoch run? ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Run:
    """Run the epoch."""

    epoch: Epoch


@dataclass(frozen=True, slots=True)
class Redeliver:
    """The epoch is committed but Spark does not know it: deliver its stored productions again, run nothing."""

    epoch: Epoch


def decide(history: History, epoch: Epoch, spark_query: str, offsets: str) -> Run | Redeliver:
    """What to do with the epoch that Spark offers. Refuses what does not fit the journal."""
    check_binding(history, spark_query)
    if epoch == history.epoch + 1:
        return Run(epoch)
    if epoch == history.epoch:
        found = history.recent[epoch].offsets
        if found != offsets:
            raise UserError(
                f"epoch {epoch} is committed for other source offsets (digest {found}) than Spark's checkpoint now "
                f"holds (digest {offsets}). The Spark checkpoint was replaced or rolled back; put back the one this "
                "store was written with, or start with a new store and a new checkpoint."
            )
        return Redeliver(epoch)
    raise UserError(_apart(f"offers epoch {epoch}", history))


def check_start(history: History, spark_query: str | None, before: Epoch, after: Epoch) -> None:
    """Refuses, before anything runs, a checkpoint whose last finished epoch does not fit the journal.

    Spark finishes an epoch after its commit here, so it may be one behind, and never ahead. An older driver may still
    run epochs: what was finished is looked at before the journal is read, which has at least that, and after it.
    """
    check_binding(history, spark_query)
    if before > history.epoch:
        raise UserError(_apart(f"has finished epoch {before}", history))
    if after < history.epoch - 1:
        raise UserError(_apart(f"has finished epoch {after}", history))


def _apart(found: str, history: History) -> str:
    return (
        f"Spark's checkpoint {found}, but the store's last commit is epoch {history.epoch}. The checkpoint and the "
        "store do not belong together: one of them was deleted, replaced or rolled back. Put back the matching one, "
        "or start with a new store and a new checkpoint."
    )


def check_binding(history: History, spark_query: str | None) -> None:
    """Refuses a Spark checkpoint that is not the one this journal was written with."""
    if history.spark_query is not None and history.spark_query != spark_query:
        raise UserError(
            f"this store belongs to the Spark query {history.spark_query}, but its checkpoint "
            + ("is missing" if spark_query is None else f"belongs to the Spark query {spark_query}")
            + f". Epochs 0..{history.epoch} are in the state already and would be applied again or skipped. Put back "
            "the original checkpoint, or start with a new store and a new checkpoint."
        )


# -- does this attempt count? ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception in user code, as data."""

    step: str
    key: str
    record: str
    cause: str
    trace: str


@dataclass(frozen=True, slots=True)
class Damage:
    """A stored object that is not as it was written."""

    name: str
    found: str
    expected: str


@dataclass(frozen=True, slots=True)
class Report:
    """What the task of one slot and level did: objects written, receipts seen, and what went wrong, if anything.

    `receipts` maps each producer task that this slot consumed to the digest of all that the producer sent out.
    `failure` is user code that raised, `damage` an object that cannot be used, `trouble` what may pass by itself.
    `clocks` (of sources, from level 1 only) and `watermarks` (of the level's steps) are as this slot sees them;
    `passed` is what it passes on of steps with holds. `samples` are a few records of each source.
    """

    slot: int
    receipts: dict[str, str]
    added: tuple[SegmentRef, ...] = ()
    edits: tuple[Edit, ...] = ()
    outputs: tuple[Output, ...] = ()
    records: dict[str, int] = field(default_factory=dict)
    failure: Failure | None = None
    damage: Damage | None = None
    trouble: str | None = None
    timings_ms: dict[str, float] = field(default_factory=dict)
    level: int = 1
    clocks: dict[str, SourceClock] = field(default_factory=dict)
    watermarks: dict[str, int] = field(default_factory=dict)
    late: dict[str, LateCount] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)
    samples: dict[str, tuple[bytes, ...]] = field(default_factory=dict)
    elsewhere: str = ""
    """The worker that it ran on, if that is another than it was placed on."""
    gave_up: bool = False
    """Whether it did nothing for that reason."""
    loads: dict[str, bytes] = field(default_factory=dict)
    """What the level's steps had to do here, packed (see `protocol.statistics`)."""
    through: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """The segments that workers have got which are about to take over something of this slot."""
    read: dict[str, int] = field(default_factory=dict)
    """Bytes of state that had not been read here before: `found` here, `fetched`, checked `ahead` of time, of these of
    what is `coming`, of which so many are still `unchecked`."""
    unobserved: dict[str, str] = field(default_factory=dict)
    """The observations that failed, and why (see `engine.observing`)."""


@dataclass(frozen=True, slots=True)
class Accept:
    """Commit the attempt with these parts."""

    added: tuple[SegmentRef, ...]
    edits: tuple[Edit, ...]
    outputs: tuple[Output, ...]
    records: dict[str, int]
    clocks: dict[str, SourceClock] = field(default_factory=dict)
    watermarks: dict[str, int] = field(default_factory=dict)
    late: dict[str, LateCount] = field(default_factory=dict)
    dead_letters: dict[str, int] = field(default_factory=dict)
    passed: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Reject:
    """Abort the attempt. With a `failure` or `damage` the query stops; else the epoch is planned again."""

    reason: str
    failure: Failure | None = None
    damage: Damage | None = None


def judge(slot_count: int, producers: int, reports: Sequence[Report], levels: int = 1) -> Accept | Reject:
    """Whether an attempt that Spark calls successful may be committed.

    The producers of level 1 are the map tasks; those of every other level are the slots of the level before.
    """
    for report in reports:
        if report.level == 0 and report.failure is not None:  # a map task has nothing else to report
            return Reject(f"map {report.failure.step}: {report.failure.cause}", report.failure)
    by_place = {(report.level, report.slot): report for report in reports}
    expected = [(level, slot) for level in range(1, levels + 1) for slot in range(slot_count)]
    if len(by_place) != len(reports) or sorted(by_place) != expected:
        found = sorted((report.level, report.slot) for report in reports)
        raise InvariantViolation(
            f"reports of (level, slot) {found} found, one of each of levels 1..{levels} and slots 0..{slot_count - 1} "
            "expected"
        )
    ordered = [by_place[place] for place in expected]
    for report in ordered:
        if report.failure is not None:
            return Reject(f"step {report.failure.step}: {report.failure.cause}", report.failure)
        if report.damage is not None:
            return Reject(f"{report.damage.name} is damaged", damage=report.damage)
        if report.trouble is not None:
            return Reject(f"slot {report.slot}: {report.trouble}")
    for level in range(1, levels + 1):
        seen = [report.receipts for report in ordered if report.level == level]
        mixed = disagreement(seen, producers if level == 1 else slot_count)
        if mixed:
            return Reject(mixed)
    watermarks: dict[str, int] = {}
    passed: dict[str, int] = {}
    for report in ordered:
        for step, mark in report.watermarks.items():
            watermarks[step] = min(mark, watermarks.get(step, END_OF_TIME))
        for step, mark in report.passed.items():
            passed[step] = min(mark, passed.get(step, END_OF_TIME))
    return Accept(
        tuple(ref for report in ordered for ref in report.added),
        tuple(edit for report in ordered for edit in report.edits),
        tuple(ref for report in ordered for ref in report.outputs),
        _sums(report.records for report in ordered),
        ordered[0].clocks,
        watermarks,
        {step: count for step, count in _late_together(report.late for report in ordered).items() if any(count)},
        {step: count for step, count in _sums(report.dead_letters for report in ordered).items() if count},
        passed,
    )


def disagreement(receipts: Sequence[Mapping[str, str]], producers: int) -> str | None:
    """Says which producer was seen in two versions, or not by all; None if everybody saw the same."""
    first = receipts[0]
    if len(first) != producers:
        raise InvariantViolation(f"{len(first)} producers reached slot 0, {producers} were run")
    for slot, seen in enumerate(receipts):
        if seen.keys() != first.keys():
            raise InvariantViolation(f"slot {slot} consumed {sorted(seen)}, slot 0 consumed {sorted(first)}")
        for producer, digest in seen.items():
            if digest != first[producer]:
                return (
                    f"receipts differ: slot {slot} consumed version {digest} of producer {producer}, "
                    f"slot 0 consumed version {first[producer]}"
                )
    return None
