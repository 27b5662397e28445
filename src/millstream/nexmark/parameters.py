"""What there is to say about a NEXMark stream: its proportions, sizes and times, and the words it is made of.

Rules
-----
- A stream is a function of these parameters and of an event's number, and of nothing else. `expressions` says it in
  Spark SQL and `events` in NumPy; a test compares the two.
- All arithmetic is on whole numbers of 64 bits, so that both come to the same on every machine.
- The defaults are those of the reference generator.
- A position is where an event comes in the stream; its number decides what it is. They differ only with `group`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from millstream.errors import UserError

PEOPLE, AUCTIONS, BIDS = "people", "auctions", "bids"
KINDS = (PEOPLE, AUCTIONS, BIDS)

SCHEMAS = {
    PEOPLE: "id long, name string, email string, credit_card string, city string, state string, ts timestamp, "
    "extra string, mark timestamp",
    AUCTIONS: "id long, item string, description string, initial_bid long, reserve long, ts timestamp, "
    "expires timestamp, seller long, category long, extra string, mark timestamp",
    BIDS: "auction long, bidder long, price long, ts timestamp, extra string, mark timestamp",
}
"""The columns of each kind of event. `mark` states the watermark: nothing older follows."""

FIRST_ID, FIRST_CATEGORY, CATEGORIES = 1000, 10, 5
HOT_EVERY = 100
"""One in so many auctions, sellers and bidders is a hot one."""
START = datetime(2026, 1, 1, tzinfo=UTC)
END = datetime(3000, 1, 1, tzinfo=UTC)
"""What the last event of each kind states as the watermark: time is over, and everything closes."""
START_US, END_US = (int(moment.timestamp()) * 1_000_000 for moment in (START, END))
SCRAMBLE = 7919
"""A prime: positions of a group times it, modulo the size of the group, are the group in another order."""

FIRST_NAMES = ("Ada", "Bruno", "Clara", "Dario", "Edith", "Felix", "Greta", "Hugo", "Irene", "Jonas", "Klara", "Luis")
LAST_NAMES = ("Archer", "Baker", "Carter", "Dyer", "Fletcher", "Glover", "Mason", "Miller", "Potter", "Sawyer")
HOSTS = ("mill.example", "post.example", "river.example")
TOWNS = (
    ("Bend", "OR"),
    ("Salem", "OR"),
    ("Boise", "ID"),
    ("Moscow", "ID"),
    ("Fresno", "CA"),
    ("Eureka", "CA"),
    ("Reno", "NV"),
    ("Provo", "UT"),
    ("Butte", "MT"),
    ("Taos", "NM"),
    ("Laramie", "WY"),
    ("Yakima", "WA"),
)
ADJECTIVES = ("old", "new", "rare", "large", "tiny", "painted", "silver", "wooden", "broken", "signed")
NOUNS = ("clock", "lamp", "chair", "map", "violin", "kettle", "mirror", "saddle", "globe", "anvil", "quilt")

FIELDS = (
    "first_name",
    "last_name",
    "host",
    "town",
    "card",
    "adjective",
    "noun",
    "condition",
    "initial_bid",
    "reserve",
    "length",
    "is_hot",
    "choice",
    "is_hot_bidder",
    "bidder",
    "category",
    "price",
    "is_delayed",
    "delay",
    "extra",
)
"""What is drawn by chance: each from a hash of the event's number and a salt of its own."""

DECADES = 6
STEPS = tuple(round((1 << 16) * 10 ** (step / 64)) for step in range(65))
"""Powers of ten, from 1 to 10, in 64 steps. Between two steps prices are on a line: log-uniform, in whole numbers."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """A NEXMark stream. The defaults are those of the reference generator.

    >>> Parameters(events=1_000_000, dilation=60).gap_text
    '1 event each 6000 microseconds'
    """

    events: int | None = None
    """How many events there are, of all kinds; None for a stream without end."""
    events_per_second: int = 10_000
    """How many events there are in a second of event time, before it is dilated."""
    dilation: int = 1
    """By how much event time goes faster, so that long windows fill: Megaphone's time-dilated queries."""
    people: int = 1
    auctions: int = 3
    bids: int = 46
    """So many people, auctions and bids come in turn."""
    hot_auctions: int = 2
    hot_sellers: int = 4
    hot_bidders: int = 4
    """All but one in so many bids are for a hot auction, auctions of a hot seller, bids of a hot bidder."""
    in_flight: int = 100
    """Other bids are for one of so many latest auctions; and so many are open at a time, on average."""
    active_people: int = 1000
    """Other sellers and bidders are among so many latest people."""
    person_bytes: int = 200
    auction_bytes: int = 500
    bid_bytes: int = 100
    """How large records are: eight bytes for a number or a time, and the length of texts. `extra` fills them up."""
    delayed: int = 0
    """How many of a hundred events come late: their times lie up to `delay_us` back."""
    delay_us: int = 0
    group: int = 1
    """Within groups of so many, events come out of order."""
    seed: int = 0

    def __post_init__(self) -> None:
        lows = {"delayed": 0, "delay_us": 0, "seed": 0, "person_bytes": 0, "auction_bytes": 0, "bid_bytes": 0}
        for field in fields(self):
            value, low = getattr(self, field.name), lows.get(field.name, 1)
            if field.name == "events" and value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UserError(f"NEXMark: {field.name}={value!r}; give a whole number of at least {low}")
        if self.delayed > 100:
            raise UserError(f"NEXMark: delayed={self.delayed}; give how many of a hundred events come late")
        if self.delayed and not self.delay_us:
            raise UserError("NEXMark: delayed events need delay_us, the longest delay in microseconds")
        if math.gcd(self.group, SCRAMBLE) != 1:
            raise UserError(f"NEXMark: group={self.group}; a multiple of {SCRAMBLE} would leave events in order")
        if self.events is not None:
            if self.events < self.turn:
                raise UserError(f"NEXMark: events={self.events}; give at least {self.turn}, so that all kinds come")
            if self.events_to_us(self.events + self.group) >= END_US - START_US:
                raise UserError(
                    f"NEXMark: events={self.events} with dilation={self.dilation}: their times would go beyond the "
                    f"year {END.year}; take fewer, or a smaller dilation"
                )

    @property
    def turn(self) -> int:
        """How many events come in turn: 50 in the reference."""
        return self.people + self.auctions + self.bids

    @property
    def gap_text(self) -> str:
        """How far events are apart, in words."""
        return f"1 event each {self.events_to_us(1)} microseconds"

    @property
    def longest_us(self) -> int:
        """No auction is open for longer: twice the time in which as many auctions come as are in flight."""
        return max(1, 2 * self.events_to_us(self.in_flight * self.turn // self.auctions))

    def events_to_us(self, count: int) -> int:
        """How much event time so many events take, in microseconds."""
        return count * 1_000_000 * self.dilation // self.events_per_second

    def salt(self, field: str) -> int:
        """What the hash of a field is salted with."""
        return self.seed * len(FIELDS) + FIELDS.index(field)

    def first_place(self, kind: str) -> int:
        """The first place of a kind in a turn."""
        return {PEOPLE: 0, AUCTIONS: self.people, BIDS: self.people + self.auctions}[kind]

    def number_of(self, position: int) -> int:
        """The number of the event at a position."""
        within = position % self.group
        return position - within + within * SCRAMBLE % self.group

    def kind_of(self, position: int) -> str:
        """The kind of the event at a position."""
        place = self.number_of(position) % self.turn
        return PEOPLE if place < self.people else AUCTIONS if place < self.people + self.auctions else BIDS

    def last_position(self, kind: str) -> int:
        """The position of the last event of a kind; -1 in a stream without end."""
        if self.events is None:
            return -1
        for position in range(self.events - 1, -1, -1):
            if self.kind_of(position) == kind:
                return position
        raise UserError(f"NEXMark: no {kind} among {self.events} events in groups of {self.group}; take more events")
