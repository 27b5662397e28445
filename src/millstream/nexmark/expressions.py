"""The generator in Spark SQL: texts of expressions over a column `position`, for batch and stream alike.

Rules
-----
- Texts only: `frames` makes frames of them, `events` says the same in NumPy, and a test compares the two.
- Three layers, each of which uses the names of the one before: what and when an event is, what it refers to, its
  columns. Spark collapses them into one.
- Nothing depends on how the numbers are spread over tasks: there is no state, and no chance but hashes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millstream.nexmark import parameters as words
from millstream.nexmark.parameters import AUCTIONS, BIDS, PEOPLE, Parameters


def numbering(given: Parameters) -> dict[str, str]:
    """First layer: the number of the event at a position, its turn and its place in it."""
    group = given.group
    scrambled = f"position - position % {group} + ((position % {group}) * {words.SCRAMBLE}) % {group}"
    event = "position" if group == 1 else scrambled
    return {
        "position": "position",
        "event": event,
        "turn": f"({event}) div {given.turn}",
        "place": f"({event}) % {given.turn}",
    }


def is_kind(given: Parameters, kind: str) -> str:
    """Which events are of a kind, and before the end."""
    first = given.first_place(kind)
    count = {PEOPLE: given.people, AUCTIONS: given.auctions, BIDS: given.bids}[kind]
    within = f"place >= {first} AND place < {first + count}"
    return within if given.events is None else f"{within} AND position < {given.events}"


def references(given: Parameters, kind: str) -> dict[str, str]:
    """Second layer: when the event is, and which people and auctions there are by then, counted from 0."""
    time = f"{words.START_US} + event * {1_000_000 * given.dilation} div {given.events_per_second}"
    behind = f"if({_draw(given, 'is_delayed', 100)} < {given.delayed}, 1 + {_draw(given, 'delay', given.delay_us)}, 0)"
    begun = f"(position - position % {given.group})"
    reached = f"{words.START_US} + {begun} * {1_000_000 * given.dilation} div {given.events_per_second}"
    mark = f"{reached} - {given.delay_us}" if given.delayed else reached
    people, auctions = given.people, given.auctions
    return {
        "event": "event",
        "us": f"{time} - {behind}" if given.delayed else time,
        "mark_us": f"if(position = {given.last_position(kind)}, {words.END_US}, {mark})",
        "person": f"turn * {people} + least(place, {people - 1})",
        "auction": f"turn * {auctions} + least(place - {people}, {auctions - 1})",
    }


def columns(given: Parameters, kind: str) -> dict[str, str]:
    """Third layer: the columns of a kind."""
    return {PEOPLE: _people, AUCTIONS: _auctions, BIDS: _bids}[kind](given)


def _people(given: Parameters) -> dict[str, str]:
    first, last = _pick(given, "first_name", words.FIRST_NAMES), _pick(given, "last_name", words.LAST_NAMES)
    texts = {
        "name": f"concat({first}, ' ', {last})",
        "email": f"lower(concat({first}, '.', {last}, '@', {_pick(given, 'host', words.HOSTS)}))",
        "credit_card": f"lpad(cast({_draw(given, 'card', 10**16)} AS string), 16, '0')",
        "city": _pick(given, "town", [city for city, _ in words.TOWNS]),
        "state": _pick(given, "town", [state for _, state in words.TOWNS]),
    }
    return {
        "id": f"{words.FIRST_ID} + person",
        **texts,
        "ts": "timestamp_micros(us)",
        "extra": _extra(given, given.person_bytes - 16, texts.values()),
        "mark": "timestamp_micros(mark_us)",
    }


def _auctions(given: Parameters) -> dict[str, str]:
    adjective, noun = _pick(given, "adjective", words.ADJECTIVES), _pick(given, "noun", words.NOUNS)
    texts = {
        "item": f"concat({adjective}, ' ', {noun})",
        "description": f"concat('one ', {noun}, ', ', {_pick(given, 'condition', words.ADJECTIVES)})",
    }
    initial_bid = _price(given, "initial_bid")
    seller = _hot_or_active(given, "person", given.hot_sellers, given.active_people, "is_hot", "choice", 0)
    return {
        "id": f"{words.FIRST_ID} + auction",
        **texts,
        "initial_bid": initial_bid,
        "reserve": f"{initial_bid} + {_price(given, 'reserve')}",
        "ts": "timestamp_micros(us)",
        "expires": f"timestamp_micros(us + 1 + {_draw(given, 'length', given.longest_us)})",
        "seller": f"{words.FIRST_ID} + {seller}",
        "category": f"{words.FIRST_CATEGORY} + {_draw(given, 'category', words.CATEGORIES)}",
        "extra": _extra(given, given.auction_bytes - 56, texts.values()),
        "mark": "timestamp_micros(mark_us)",
    }


def _bids(given: Parameters) -> dict[str, str]:
    auction = _hot_or_active(given, "auction", given.hot_auctions, given.in_flight, "is_hot", "choice", 0)
    bidder = _hot_or_active(given, "person", given.hot_bidders, given.active_people, "is_hot_bidder", "bidder", 1)
    return {
        "auction": f"{words.FIRST_ID} + {auction}",
        "bidder": f"{words.FIRST_ID} + {bidder}",
        "price": _price(given, "price"),
        "ts": "timestamp_micros(us)",
        "extra": _extra(given, given.bid_bytes - 32, ()),
        "mark": "timestamp_micros(mark_us)",
    }


def _hash(given: Parameters, field: str) -> str:
    return f"xxhash64(event, {given.salt(field)}L)"


def _draw(given: Parameters, field: str, below: int | str) -> str:
    """A number from 0 to below a limit."""
    limit = f"{below}L" if isinstance(below, int) else below
    return f"pmod({_hash(given, field)}, {limit})"


def _pick(given: Parameters, field: str, texts: Sequence[str]) -> str:
    return f"element_at(array({_listed(texts)}), cast({_draw(given, field, len(texts))} AS int) + 1)"


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(f"'{text}'" for text in texts)


def _price(given: Parameters, field: str) -> str:
    """A price in cents, log-uniform from 1 to a million."""
    drawn = _draw(given, field, words.DECADES << 16)
    steps = f"array({', '.join(f'{step}L' for step in words.STEPS)})"
    tens = f"array({', '.join(f'{100 * 10**power}L' for power in range(words.DECADES))})"
    step, within = f"cast({drawn} div 1024 % 64 AS int)", f"({drawn} % 1024)"
    between = f"element_at({steps}, {step} + 1) * (1024 - {within}) + element_at({steps}, {step} + 2) * {within}"
    return f"(element_at({tens}, cast({drawn} div 65536 AS int) + 1) * ({between}) div 67108864)"


def _hot_or_active(
    given: Parameters, newest: str, ratio: int, active: int, is_hot: str, choice: str, beside: int
) -> str:
    """The id of a hot one, or of one of the newest. `newest` is the newest there is."""
    hot = f"least({newest} div {words.HOT_EVERY} * {words.HOT_EVERY} + {beside}, {newest})"
    other = f"{newest} - {_draw(given, choice, f'least({newest} + 1, {active})')}"
    return f"if({_draw(given, is_hot, ratio)} > 0, {hot}, {other})"


def _extra(given: Parameters, size: int, texts: Iterable[str]) -> str:
    """A text that fills a record up to its size: digits of a hash, repeated."""
    used = "".join(f" - length({text})" for text in texts)
    digits = f"lpad(hex({_hash(given, 'extra')}), 16, '0')"
    return f"substr(repeat({digits}, {max(0, -(-size // 16))}), 1, cast(greatest({size}{used}, 0) AS int))"
