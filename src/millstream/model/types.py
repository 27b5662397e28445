"""Column types: Spark DDL <-> Arrow types, and user values -> Arrow arrays of exactly those types.

Rules kept here:

* No Spark. A query is validated without a JVM, so DDL is parsed here rather than by Spark's own parser. What
  is accepted is what Spark's parser accepts, and the Arrow type is the one Spark's `to_arrow_type` gives
  (list child `element`, map children `key`/`value`, nullability, comments as Spark's field metadata), except
  that a timestamp's zone is always UTC.
* `parse_type(format_type(t)) == t` for every type `format_type` accepts; it refuses all others.
* A name occurs once per struct or schema, ignoring case, as Spark resolves names.
* No value changes silently. Conversions keep every value exactly, or raise `UserError` naming what was found
  and what was expected. Never converted: text to numbers, fractions to integers, booleans to numbers, times
  with a zone to times without one (or back). The one rounding allowed is of a Python float, which has no
  32-bit form, to FLOAT; and even that may not overflow.
* NaN is a number, not a null. Only None (and pandas' NA, NaT, and NaN among objects) is null.
* Nulls below the top level obey NOT NULL; at the top level that belongs to the field, so to the caller.
"""

from __future__ import annotations

import dataclasses
import datetime as dt
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.errors import UserError

SPARK_METADATA_KEY = b"SPARK::metadata::json"
"""Where Spark keeps a field's metadata (its comment among it) in an Arrow field."""

TIMESTAMP = pa.timestamp("us", tz="UTC")
TIMESTAMP_NTZ = pa.timestamp("us")
INTERVAL = pa.duration("us")

# ------------------------------------------------------------------------------------------ names of types

_SIMPLE_TYPES: dict[str, pa.DataType] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "byte": pa.int8(),
    "smallint": pa.int16(),
    "short": pa.int16(),
    "int": pa.int32(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "long": pa.int64(),
    "float": pa.float32(),
    "real": pa.float32(),
    "double": pa.float64(),
    "binary": pa.binary(),
    "date": pa.date32(),
}

_CANONICAL_NAMES: dict[pa.DataType, str] = {
    pa.bool_(): "BOOLEAN",
    pa.int8(): "TINYINT",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.string(): "STRING",
    pa.binary(): "BINARY",
    pa.date32(): "DATE",
    TIMESTAMP: "TIMESTAMP",
    TIMESTAMP_NTZ: "TIMESTAMP_NTZ",
    INTERVAL: "INTERVAL DAY TO SECOND",
}

_SUPPORTED = (
    "supported types are BOOLEAN, TINYINT, SMALLINT, INT, BIGINT, FLOAT, DOUBLE, DECIMAL(p,s), STRING, "
    "CHAR(n), VARCHAR(n), BINARY, DATE, TIMESTAMP, TIMESTAMP_NTZ, INTERVAL DAY TO SECOND, ARRAY<t>, "
    "MAP<k,v> and STRUCT<name: t, ...>"
)

_UNSUPPORTED_TYPES = {
    "void": "give the column a type, for example CAST(NULL AS STRING)",
    "variant": "extract what is needed with variant_get, or use to_json to make it a STRING",
    "time": "cast it to STRING, or keep it as an INTERVAL HOUR TO SECOND since midnight",
    "geometry": "use st_asbinary to make it a BINARY",
    "geography": "use st_asbinary to make it a BINARY",
    "interval": "say INTERVAL DAY TO SECOND, and keep months, if any, in an INT",
    "year-month interval": "keep the number of months in an INT",
    "collated string": "use a plain STRING, with lower() or collation_key() where order or equality need it",
    "timestamp precision": "only microseconds, precision 6, are kept: use TIMESTAMP or TIMESTAMP_NTZ",
}

_DAY_TIME_UNITS = ("day", "hour", "minute", "second")
_YEAR_MONTH_UNITS = ("year", "month")
_MAX_DECIMAL_PRECISION = 38

# ---------------------------------------------------------------------------------------------- parsing DDL


def parse_type(ddl: str) -> pa.DataType:
    """The Arrow type of one Spark DDL type, such as `map<string, array<decimal(10, 2)>>`."""
    parser = _Parser(ddl)
    parsed = parser.type()
    parser.end()
    return parsed


def parse_schema(ddl: str) -> pa.Schema:
    """The Arrow schema of a Spark DDL field list, `a int not null, b: string`, or of one `struct<...>`."""
    parser = _Parser(ddl)
    fields = list(parser.type()) if parser.at_struct_type() else parser.fields()
    parser.end()
    return pa.schema(fields)


class _Token(NamedTuple):
    kind: str
    """word, quoted (a backquoted name), string, punctuation or end."""
    text: str
    """As written, except that a quoted name or string is unescaped."""
    start: int


_TOKEN = re.compile(
    r"""(?P<space> \s+ | --[^\n]* | /\*(?!\+).*?\*/ )
      | (?P<word> [A-Za-z0-9_]+ )
      | (?P<quoted> `(?:[^`]|``)*` )
      | (?P<string> '(?:[^'\\]|\\.|'')*' | "(?:[^"\\]|\\.|"")*" )
      | (?P<punctuation> [<>(),:] )""",
    re.VERBOSE | re.DOTALL,
)

_NUMBER = re.compile(r"\d+(e\d+)?([lsydf]|bd)?", re.IGNORECASE)
"""Words that Spark reads as a number, so never as a bare name."""

_ESCAPE = re.compile(
    r"\\(?:u(?P<u4>[0-9a-fA-F]{4})|U(?P<u8>[0-9a-fA-F]{8})|(?P<octal>[01][0-7]{2})|(?P<char>.))", re.DOTALL
)
_ESCAPED_CHARACTERS = {
    "0": "\0", "b": "\b", "n": "\n", "r": "\r", "t": "\t", "Z": "\x1a", "%": "\\%", "_": "\\_",
}  # fmt: skip


def _tokens(ddl: str) -> list[_Token]:
    tokens, position = [], 0
    while position < len(ddl):
        match = _TOKEN.match(ddl, position)
        if match is None:
            _syntax_error(ddl, position, f"unexpected {ddl[position]!r}; names other than [A-Za-z0-9_] need backquotes")
        kind, text = str(match.lastgroup), match.group()
        if kind == "quoted":
            text = text[1:-1].replace("``", "`")
        elif kind == "string":
            text = _unescape(ddl, position, text)
        if kind != "space":
            tokens.append(_Token(kind, text, position))
        position = match.end()
    return [*tokens, _Token("end", "", len(ddl))]


def _unescape(ddl: str, position: int, literal: str) -> str:
    quote, body = literal[0], literal[1:-1]

    def character(match: re.Match[str]) -> str:
        code = match["u4"] or match["u8"]
        if code:
            if int(code, 16) > sys.maxunicode:
                _syntax_error(ddl, position, f"{match.group()} is not a character")
            return chr(int(code, 16))
        if match["octal"]:
            return chr(int(match["octal"], 8))
        return _ESCAPED_CHARACTERS.get(match["char"], match["char"])

    # A doubled quote is one quote, unless a backslash already took the first: split on escapes to tell.
    pieces, last = [], 0
    for match in _ESCAPE.finditer(body):
        pieces += [body[last : match.start()].replace(quote * 2, quote), character(match)]
        last = match.end()
    return "".join([*pieces, body[last:].replace(quote * 2, quote)])


def _syntax_error(ddl: str, position: int, problem: str) -> NoReturn:
    line_start = ddl.rfind("\n", 0, position) + 1
    line = ddl[line_start:].split("\n", 1)[0]
    column = position - line_start
    where = f"line {ddl.count(chr(10), 0, position) + 1}, column {column + 1}"
    raise UserError(f"cannot read {ddl!r} as Spark DDL ({where}): {problem}\n  {line}\n  {' ' * column}^")


class _Parser:
    """Recursive descent over Spark's grammar of data types; one method per rule."""

    def __init__(self, ddl: str) -> None:
        self._ddl = ddl
        self._tokens = _tokens(ddl)
        self._index = 0

    # -- tokens

    @property
    def _token(self) -> _Token:
        return self._tokens[self._index]

    def _next(self) -> _Token:
        token = self._token
        if token.kind != "end":
            self._index += 1
        return token

    def _fail(self, expected: str) -> NoReturn:
        found = repr(self._token.text) if self._token.kind != "end" else "the end"
        _syntax_error(self._ddl, self._token.start, f"expected {expected}, found {found}")

    def _unsupported(self, token: _Token, found: str, kind: str) -> NoReturn:
        problem = f"{found} is not supported: {_UNSUPPORTED_TYPES[kind]}"
        _syntax_error(self._ddl, token.start, f"{problem}; {_SUPPORTED}")

    def _at(self, *words: str) -> bool:
        """Whether the next tokens are these keywords or punctuation."""
        following = self._tokens[self._index : self._index + len(words)]
        return [t.text.lower() if t.kind in ("word", "punctuation") else None for t in following] == list(words)

    def _took(self, *words: str) -> bool:
        found = self._at(*words)
        if found:
            self._index += len(words)
        return found

    def _take(self, word: str) -> None:
        if not self._took(word):
            self._fail(repr(word))

    def _integer(self, what: str) -> int:
        if not (self._token.kind == "word" and self._token.text.isdigit()):
            self._fail(what)
        return int(self._next().text)

    # -- grammar

    def end(self) -> None:
        if self._token.kind != "end":
            self._fail("the end")

    def at_struct_type(self) -> bool:
        return self._at("struct", "<")

    def fields(self) -> list[pa.Field]:
        fields: list[pa.Field] = []
        seen: dict[str, str] = {}
        while not fields or self._took(","):
            start = self._token.start
            field = self._field()
            other = seen.setdefault(field.name.lower(), field.name)
            if len(seen) == len(fields):
                problem = f"field {field.name!r} repeats {other!r}; names are compared ignoring case, so rename one"
                _syntax_error(self._ddl, start, problem)
            fields.append(field)
        return fields

    def _field(self) -> pa.Field:
        name = self._name()
        self._took(":")
        data_type = self.type()
        nullable = not self._took("not", "null")
        metadata = _comment_metadata(self._comment()) if self._took("comment") else None
        return pa.field(name, data_type, nullable=nullable, metadata=metadata)

    def _name(self) -> str:
        token = self._token
        if token.kind != "quoted" and (token.kind != "word" or _NUMBER.fullmatch(token.text)):
            self._fail("a field name")
        return self._next().text

    def _comment(self) -> str:
        if self._token.kind != "string":
            self._fail("a quoted comment")
        text = ""
        while self._token.kind == "string":  # adjacent literals are one, as in Spark
            text += self._next().text
        return text

    def type(self) -> pa.DataType:
        token = self._token
        if token.kind != "word" or token.text.isdigit():
            self._fail("a type")
        self._next()
        name = token.text.lower()
        if name in _SIMPLE_TYPES:
            return _SIMPLE_TYPES[name]
        rule = self._RULES.get(name)
        if rule is not None:
            return rule(self, token)
        if name in _UNSUPPORTED_TYPES:
            self._unsupported(token, name.upper(), name)
        _syntax_error(self._ddl, token.start, f"{token.text!r} is not a type; {_SUPPORTED}")

    def _decimal(self, token: _Token) -> pa.DataType:
        precision, scale = 10, 0
        if self._took("("):
            precision = self._integer("a precision")
            scale = self._integer("a scale") if self._took(",") else 0
            self._take(")")
        if not (1 <= precision <= _MAX_DECIMAL_PRECISION and scale <= precision):
            problem = f"DECIMAL({precision},{scale}) needs a precision from 1 to 38 and a scale of at most that"
            _syntax_error(self._ddl, token.start, problem)
        return pa.decimal128(precision, scale)

    def _string(self, token: _Token) -> pa.DataType:
        if token.text.lower() != "string":
            self._take("(")
            self._integer("a length")
            self._take(")")
        if self._took("collate"):
            collation = self._name()
            if collation.lower() != "utf8_binary":
                self._unsupported(token, f"a string with collation {collation}", "collated string")
        return pa.string()

    def _timestamp(self, token: _Token) -> pa.DataType:
        name = token.text.lower()
        if self._took("("):
            if self._integer("a precision") != 6:
                self._unsupported(token, f"{name.upper()} with another precision than 6", "timestamp precision")
            self._take(")")
        if name == "timestamp_ntz" or (name == "timestamp" and self._took("without", "time", "zone")):
            return TIMESTAMP_NTZ
        if name == "timestamp":
            self._took("with", "local", "time", "zone")
        return TIMESTAMP

    def _interval(self, token: _Token) -> pa.DataType:
        first = self._token.text.lower() if self._token.kind == "word" else ""
        if first in _YEAR_MONTH_UNITS:
            self._unsupported(token, "a year-month INTERVAL", "year-month interval")
        if first not in _DAY_TIME_UNITS:
            self._unsupported(token, "a calendar INTERVAL (without units)", "interval")
        self._next()
        if self._took("to"):
            finer = _DAY_TIME_UNITS[_DAY_TIME_UNITS.index(first) + 1 :]
            if not any(self._took(unit) for unit in finer):
                self._fail(f"a unit finer than {first}")
        return INTERVAL

    def _array(self, _: _Token) -> pa.DataType:
        self._take("<")
        element = self.type()
        self._take(">")
        return pa.list_(pa.field("element", element))

    def _map(self, _: _Token) -> pa.DataType:
        self._take("<")
        key = self.type()
        self._take(",")
        value = self.type()
        self._take(">")
        return pa.map_(pa.field("key", key, nullable=False), pa.field("value", value))

    def _struct(self, _: _Token) -> pa.DataType:
        self._take("<")
        fields = [] if self._at(">") else self.fields()
        self._take(">")
        return pa.struct(fields)

    _RULES: ClassVar[dict[str, Callable[[_Parser, _Token], pa.DataType]]] = {
        **dict.fromkeys(("decimal", "dec", "numeric"), _decimal),
        **dict.fromkeys(("string", "char", "character", "varchar"), _string),
        **dict.fromkeys(("timestamp", "timestamp_ltz", "timestamp_ntz"), _timestamp),
        "interval": _interval,
        "array": _array,
        "map": _map,
        "struct": _struct,
    }


def _comment_metadata(comment: str) -> dict[bytes, bytes]:
    return {SPARK_METADATA_KEY: json.dumps({"comment": comment}).encode()}


# ------------------------------------------------------------------------------------------- formatting DDL


def format_type(t: pa.DataType) -> str:
    """The canonical Spark DDL of an Arrow type: `parse_type` of it gives the type back.

    An Arrow type that no DDL gives is a UserError; among them arrays and maps whose values are NOT NULL, for
    which Spark's grammar has no words.
    """
    if t in _CANONICAL_NAMES:
        return _CANONICAL_NAMES[t]
    if pa.types.is_decimal128(t) and 0 <= t.scale <= t.precision:
        return f"DECIMAL({t.precision},{t.scale})"
    if pa.types.is_list(t) and t.value_field.nullable:
        return f"ARRAY<{format_type(t.value_type)}>"
    if pa.types.is_map(t) and t.item_field.nullable:
        return f"MAP<{format_type(t.key_type)}, {format_type(t.item_type)}>"
    if pa.types.is_struct(t):
        return f"STRUCT<{_format_fields(t, ': ')}>"
    raise UserError(
        f"found the Arrow type {t}, which Spark DDL has no words for; {_SUPPORTED}: cast it to one of these"
    )


def format_schema(schema: pa.Schema) -> str:
    """The canonical Spark DDL of an Arrow schema: `parse_schema` of it gives the schema back."""
    return _format_fields(schema, " ")


def _format_fields(fields: Iterable[pa.Field], separator: str) -> str:
    return ", ".join(_format_field(field, separator) for field in fields)


def _format_field(field: pa.Field, separator: str) -> str:
    bare = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", field.name)
    name = field.name if bare else "`" + field.name.replace("`", "``") + "`"
    comment = json.loads((field.metadata or {}).get(SPARK_METADATA_KEY, b"{}")).get("comment")
    ddl: str = name + separator + format_type(field.type)
    if not field.nullable:
        ddl += " NOT NULL"
    if comment is not None:
        ddl += " COMMENT '" + comment.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return ddl


def _describe(t: pa.DataType) -> str:
    """A type for an error message, where refusing to name it would hide the error."""
    try:
        return format_type(t)
    except UserError:
        return str(t)


# ----------------------------------------------------------------------------------------- families of types

_FAMILIES: tuple[tuple[str, tuple[Callable[[pa.DataType], bool], ...]], ...] = (
    ("boolean", (pa.types.is_boolean,)),
    ("integer", (pa.types.is_integer,)),
    ("float", (pa.types.is_floating,)),
    ("decimal", (pa.types.is_decimal,)),
    ("string", (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view)),
    (
        "binary",
        (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_binary_view,
            pa.types.is_fixed_size_binary,
        ),
    ),
    ("date", (pa.types.is_date,)),
    ("timestamp_ntz", (lambda t: pa.types.is_timestamp(t) and t.tz is None,)),
    ("timestamp", (pa.types.is_timestamp,)),
    ("interval", (pa.types.is_duration,)),
    ("map", (pa.types.is_map,)),
    (
        "array",
        (
            pa.types.is_list,
            pa.types.is_large_list,
            pa.types.is_fixed_size_list,
            pa.types.is_list_view,
            pa.types.is_large_list_view,
        ),
    ),
    ("struct", (pa.types.is_struct,)),
    ("null", (pa.types.is_null,)),
)

_NESTED_FAMILIES = frozenset({"array", "map", "struct"})

_WIDENINGS = frozenset({("integer", "float"), ("integer", "decimal")})
"""Conversions between families that can keep every value."""

_HINTS = {
    ("timestamp_ntz", "timestamp"): "its times have no zone: give them one (UTC?), or declare TIMESTAMP_NTZ",
    ("timestamp", "timestamp_ntz"): "its times have a zone: remove it, or declare TIMESTAMP",
    ("float", "integer"): "round and cast it to integers first (pandas turns integers with gaps to floats)",
    ("float", "decimal"): "make Decimals, or cast it, first",
}


def _family(t: pa.DataType) -> str:
    return next((family for family, tests in _FAMILIES if any(test(t) for test in tests)), "other")


def check_key_type(t: pa.DataType) -> None:
    """Refuse a type that cannot be a key: anything but a supported scalar."""
    if _family(t) in _NESTED_FAMILIES | {"null", "other"}:
        scalars = "a boolean, number, decimal, string, binary, date, timestamp or interval"
        raise UserError(f"found {_describe(t)} as the type of a key; a key is {scalars}: use its parts as keys instead")


def is_fixed_number(t: pa.DataType) -> bool:
    """Whether never-null arrays of the type are handed to users as NumPy: booleans, integers, floats."""
    return _family(t) in ("boolean", "integer", "float")


# ------------------------------------------------------------------------------------ Arrow to exactly a type


def conform(column: pa.Array | pa.ChunkedArray, t: pa.DataType) -> pa.Array:
    """The column as one array of exactly type `t`, every value kept; UserError if it cannot be."""
    if isinstance(column, pa.ChunkedArray):
        found = column.type
        column = _or_user_error(column.combine_chunks, t, lambda: f"Arrow type {found}", "")
    return _conform(column, t, "")


def _conform(column: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    found = column.type
    if pa.types.is_dictionary(found):
        return _conform(column.dictionary_decode(), t, path)
    if pa.types.is_run_end_encoded(found):
        return _conform(pc.run_end_decode(column), t, path)
    have, want = _family(found), _family(t)
    if have == "null":
        return pa.nulls(len(column), t)
    if have != want and (have, want) not in _WIDENINGS:
        raise _mismatch(t, f"Arrow type {found}", path, _HINTS.get((have, want), ""))
    if want == "struct":
        return _conform_struct(column, t, path)
    if want in _NESTED_FAMILIES:
        return _conform_lists(column, t, path)
    if found == t:
        return column
    return _or_user_error(lambda: _cast(column, t), t, lambda: f"Arrow type {found}", path)


def _cast(column: pa.Array, t: pa.DataType) -> pa.Array:
    """A cast that fails rather than change a value."""
    if pa.types.is_integer(column.type) and pa.types.is_decimal(t):
        # Straight to `t`, Arrow would ask for room for the widest integer instead of those here.
        column = column.cast(pa.decimal256(76, t.scale))
    result = column.cast(t)
    if pa.types.is_floating(column.type) and column.type.bit_width > t.bit_width:
        kept = pc.or_(pc.equal(result.cast(column.type), column), pc.is_nan(column))
        if not pc.all(kept, min_count=0).as_py():
            changed = column.filter(pc.invert(kept))[0].as_py()
            raise pa.ArrowInvalid(f"{changed!r} would be rounded; cast it first if that is meant")
    return result


def _conform_struct(column: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    found, wanted = Counter(field.name for field in column.type), Counter(field.name for field in t)
    if found != wanted:
        problem = _name_differences(found, wanted)
        raise _mismatch(t, f"Arrow type {column.type}", path, problem)
    children = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    conformed = [_conform(children[field.name], field.type, _below(path, field.name)) for field in t]
    return _build_struct(conformed, column.is_null(), t, path)


def _conform_lists(column: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    nulls = column.is_null()
    if pa.types.is_map(t):
        entry = pa.struct([column.type.key_field, column.type.item_field])
        column = column.cast(pa.list_(entry))
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    if not pa.types.is_map(t):
        child = _conform(column.flatten(), t.value_type, _below(path, "element"))
        return _build_list(lengths, child, nulls, t, path)
    keys, values = column.flatten().flatten()
    keys = _conform(keys, t.key_type, _below(path, "key"))
    values = _conform(values, t.item_type, _below(path, "value"))
    return _build_map(lengths, keys, values, nulls, t, path)


# --------------------------------------------------------------- nested arrays from their conformed children


def _build_struct(children: list[pa.Array], nulls: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    """A struct array; each child must be null wherever the struct is."""
    for field, child in zip(t, children, strict=True):
        _check_not_null(field, child.null_count - nulls.true_count, path)
    return pa.StructArray.from_arrays(children, fields=list(t), mask=nulls)


def _build_list(lengths: Any, child: pa.Array, nulls: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    _check_not_null(t.value_field, child.null_count, path)
    return pa.ListArray.from_arrays(_offsets(lengths, t, path), child, type=t, mask=nulls)


def _build_map(lengths: Any, keys: pa.Array, values: pa.Array, nulls: pa.Array, t: pa.DataType, path: str) -> pa.Array:
    _check_not_null(t.key_field, keys.null_count, path)
    _check_not_null(t.item_field, values.null_count, path)
    return pa.MapArray.from_arrays(_offsets(lengths, t, path), keys, values, t, mask=nulls)


def _offsets(lengths: Any, t: pa.DataType, path: str) -> pa.Array:
    offsets = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    if offsets[-1] > np.iinfo(np.int32).max:
        raise _mismatch(t, f"{offsets[-1]} elements in one array", path, "give smaller batches")
    return pa.array(offsets.astype(np.int32))


def _check_not_null(field: pa.Field, null_count: int, path: str) -> None:
    if null_count and not field.nullable:
        raise _mismatch(field.type, f"{null_count} null(s)", _below(path, field.name), "it is NOT NULL")


# ------------------------------------------------------------------------------------- user values to a type


def array_from(values: Any, t: pa.DataType) -> pa.Array:
    """An array of exactly type `t` from NumPy, pandas or Arrow data, a pa.Scalar (as one row) or a sequence.

    In a sequence a struct is a dict, dataclass or NamedTuple with exactly the type's field names, or a plain
    tuple with one value per field; a map is a dict or a list of pairs.
    """
    if isinstance(values, pa.Array | pa.ChunkedArray):
        return conform(values, t)
    if isinstance(values, pa.Scalar):
        return conform(pa.array([values], type=values.type), t)
    if isinstance(values, np.ndarray):
        return _from_numpy(values, t)
    pandas = sys.modules.get("pandas")  # not imported: if nobody has, this is not a Series
    if pandas is not None and isinstance(values, pandas.Series | pandas.Index):
        return _from_pandas(values, t)
    if isinstance(values, Sequence) and not isinstance(values, str | bytes | bytearray | memoryview):
        return _from_python(values, t, "")
    raise _mismatch(t, _show(values), "", "give a sequence of values, one per row")


def _from_numpy(values: Any, t: pa.DataType) -> pa.Array:
    if values.ndim != 1 and not (values.ndim > 1 and _family(t) == "array"):
        raise _mismatch(t, f"a NumPy array of {values.ndim} dimensions", "", "give one value per row")
    if values.ndim != 1 or values.dtype.kind not in "biufUSmM":
        return _from_python(list(values), t, "")
    if values.dtype.kind in "mM" and np.datetime_data(values.dtype)[0] in _COARSE_UNITS[values.dtype.kind]:
        values = values.astype(f"{values.dtype.kind}8[s]")
    native = values.astype(values.dtype.newbyteorder("="), copy=False)
    array = _or_user_error(lambda: pa.array(native), t, lambda: f"a NumPy array of {values.dtype}", "")
    return conform(array, t)


_COARSE_UNITS = {"M": ("W", "h", "m"), "m": ("W", "D", "h", "m")}
"""NumPy units that Arrow lacks and that are a whole number of seconds."""


def _from_pandas(values: Any, t: pa.DataType) -> pa.Array:
    if not isinstance(values.dtype, np.dtype):
        array = _or_user_error(lambda: pa.array(values, from_pandas=True), t, lambda: f"a pandas {values.dtype}", "")
        return conform(array, t)
    if values.dtype != object:
        return _from_numpy(values.to_numpy(), t)
    keeps_nan = _family(t) == "float"
    rows = [
        None if missing and not (keeps_nan and isinstance(value, float)) else value
        for value, missing in zip(values, values.isna(), strict=True)
    ]
    return _from_python(rows, t, "")


def _from_python(values: Sequence[Any], t: pa.DataType, path: str) -> pa.Array:
    family = _family(t)
    if family == "struct":
        return _structs_from_python(values, t, path)
    if family in _NESTED_FAMILIES:
        return _lists_from_python(values, t, path)
    return _scalars_from_python(values, t, path)


def _structs_from_python(values: Sequence[Any], t: pa.DataType, path: str) -> pa.Array:
    names = [field.name for field in t]
    null_row = (None,) * len(names)
    plain = _plain_values(values)
    rows = [null_row if value is None else _struct_row(value, names, t, path) for value in plain]
    columns = zip(*rows, strict=True) if rows else [()] * len(names)
    children = [
        _from_python(column, field.type, _below(path, field.name)) for field, column in zip(t, columns, strict=True)
    ]
    return _build_struct(children, _null_mask(plain), t, path)


def _struct_row(value: Any, names: list[str], t: pa.DataType, path: str) -> tuple[Any, ...]:
    if type(value) is dict:
        named = value
    elif type(value) is tuple and len(value) == len(names):
        return value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        named = value._asdict()
    elif isinstance(value, Mapping):
        named = dict(value)
    elif isinstance(value, tuple) and len(value) == len(names):
        return value
    elif isinstance(value, tuple):
        raise _mismatch(t, _show(value), path, f"it has {len(value)} values for {len(names)} fields")
    else:
        raise _mismatch(t, _show(value), path, "a struct is a dict, tuple, NamedTuple or dataclass")
    if named.keys() != set(names):
        raise _mismatch(t, _show(value), path, _name_differences(named, names))
    return tuple(named[name] for name in names)


def _lists_from_python(values: Sequence[Any], t: pa.DataType, path: str) -> pa.Array:
    is_map = pa.types.is_map(t)
    elements_of = _map_entries if is_map else _list_elements
    plain = _plain_values(values)
    rows = [() if value is None else elements_of(value, t, path) for value in plain]
    lengths = np.fromiter(map(len, rows), dtype=np.int64, count=len(rows))
    flat = [element for row in rows for element in row]
    nulls = _null_mask(plain)
    if not is_map:
        return _build_list(lengths, _from_python(flat, t.value_type, _below(path, "element")), nulls, t, path)
    keys = _from_python([key for key, _ in flat], t.key_type, _below(path, "key"))
    items = _from_python([item for _, item in flat], t.item_type, _below(path, "value"))
    return _build_map(lengths, keys, items, nulls, t, path)


def _list_elements(value: Any, t: pa.DataType, path: str) -> Sequence[Any]:
    if isinstance(value, np.ndarray) and value.ndim > 0:
        return value.tolist() if value.ndim == 1 and value.dtype.kind in "biuf" else list(value)
    if isinstance(value, list | tuple):
        return value
    raise _mismatch(t, _show(value), path, "an array is a list, tuple or NumPy array")


def _map_entries(value: Any, t: pa.DataType, path: str) -> Sequence[Any]:
    if isinstance(value, Mapping):
        return list(value.items())
    if isinstance(value, list | tuple) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in value):
        return value
    raise _mismatch(t, _show(value), path, "a map is a dict or a list of (key, value) tuples")


def _null_mask(values: Sequence[Any]) -> pa.Array:
    return pa.array([value is None for value in values], type=pa.bool_())


_PYTHON_TYPES: dict[str, tuple[type, ...]] = {
    "boolean": (bool,),
    "integer": (int,),
    "float": (float, int),
    "decimal": (Decimal, int),
    "string": (str,),
    "binary": (bytes, bytearray, memoryview),
    "date": (dt.date,),
    "timestamp": (dt.datetime,),
    "timestamp_ntz": (dt.datetime,),
    "interval": (dt.timedelta,),
}


def _scalars_from_python(values: Sequence[Any], t: pa.DataType, path: str) -> pa.Array:
    family = _family(t)
    if family not in _PYTHON_TYPES:
        raise UserError(f"values cannot be made into {t}; {_SUPPORTED}")
    values = _plain_values(values)
    try:
        return _strict_array(values, t, family)
    except _CONVERSION_ERRORS as error:
        position, reason = _first_bad(values, t, family, error)
    row = "" if path else f" at position {position}"
    raise _mismatch(t, f"{_show(values[position])}{row}", path, reason)


def _strict_array(values: Sequence[Any], t: pa.DataType, family: str) -> pa.Array:
    """`pa.array`, less the conversions it does silently. Raises one of `_CONVERSION_ERRORS`."""
    for kind in set(map(type, values)):
        if not _accepts(kind, family):
            raise TypeError("")
    if family in ("timestamp", "timestamp_ntz"):
        for value in values:
            if value is not None and (value.utcoffset() is None) != (family == "timestamp_ntz"):
                found = "timestamp" if family == "timestamp_ntz" else "timestamp_ntz"
                raise TypeError(_HINTS[found, family])
    if family in ("timestamp", "timestamp_ntz", "interval"):
        for value in values:  # pandas' subclasses of datetime and timedelta
            if getattr(value, "nanosecond", 0) or getattr(value, "nanoseconds", 0):
                raise ValueError("it has nanoseconds, which would be lost")
    array = pa.array(values, type=t)
    if t == pa.float32():
        wide = pa.array(values, type=pa.float64())
        if pc.any(pc.not_equal(pc.is_inf(array), pc.is_inf(wide))).as_py():
            raise ValueError("it is out of range")
    return array


def _accepts(kind: type, family: str) -> bool:
    """Whether a Python type suits a family. A bool is no integer, a datetime no date, though subclasses."""
    if kind is type(None):
        return True
    if issubclass(kind, bool):
        return family == "boolean"
    if issubclass(kind, dt.datetime):
        return family in ("timestamp", "timestamp_ntz")
    return issubclass(kind, _PYTHON_TYPES[family])


def _first_bad(values: Sequence[Any], t: pa.DataType, family: str, error: Exception) -> tuple[int, str]:
    for position, value in enumerate(values):
        try:
            _strict_array([value], t, family)
        except _CONVERSION_ERRORS as own_error:
            return position, str(own_error)
    raise error  # each is good alone: not a bad value, so not one to name


_PLAIN_TYPES = {type(None), dict, list, tuple, *(kind for kinds in _PYTHON_TYPES.values() for kind in kinds)}


def _plain_values(values: Sequence[Any]) -> Sequence[Any]:
    return values if set(map(type, values)) <= _PLAIN_TYPES else [_plain(value) for value in values]


def _plain(value: Any) -> Any:
    """A NumPy, pandas or Arrow scalar as the plain Python value that it equals, if there is one."""
    if isinstance(value, pa.Scalar):
        return value.as_py()
    if isinstance(value, np.datetime64 | np.timedelta64):
        return _plain_numpy_time(value)
    if isinstance(value, np.generic):
        return value.item()
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return value


def _plain_numpy_time(value: Any) -> Any:
    if np.isnat(value):
        return None
    kind, unit = value.dtype.kind, np.datetime_data(value.dtype)[0]
    if unit not in ("W", "D", "h", "m", "s", "ms", "us", "ns"):
        return value
    if not (kind == "M" and unit == "D"):  # days are dates, all else has a time
        micros = value.astype(f"{kind}8[us]")
        if micros != value:
            return value
        value = micros
    plain = value.item()
    return plain if isinstance(plain, dt.date | dt.timedelta) else value


def python_values(array: pa.Array) -> list[Any]:
    """The values as Python's own: None for null, a dict for a struct, a list of (key, value) for a map.

    No detour over NumPy: timed with pyarrow 26 it saved at most a fifth (100,000 doubles), and was slower for
    long text and for short arrays.
    """
    values: list[Any] = array.to_pylist()
    return values


# -------------------------------------------------------------------------------------------------- errors

_CONVERSION_ERRORS = (pa.ArrowException, ValueError, TypeError, OverflowError)


def _or_user_error(convert: Callable[[], pa.Array], t: pa.DataType, found: Callable[[], str], path: str) -> pa.Array:
    try:
        return convert()
    except _CONVERSION_ERRORS as error:
        raise _mismatch(t, found(), path, str(error)) from error


def _mismatch(t: pa.DataType, found: str, path: str, reason: str) -> UserError:
    place = f" in {path}" if path else ""
    return UserError(f"expected {_describe(t)}{place}, found {found}" + (f": {reason}" if reason else ""))


def _below(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _name_differences(found: Iterable[Any], wanted: Iterable[Any]) -> str:
    lacking, unknown = set(wanted) - set(found), set(found) - set(wanted)
    parts = [f"it lacks {sorted(lacking)}"] if lacking else []
    parts += [f"it has unknown {sorted(map(str, unknown))}"] if unknown else []
    return " and ".join(parts) or "it repeats a name"


def _show(value: Any) -> str:
    text = repr(value)
    short = text if len(text) <= 80 else text[:77] + "..."
    return f"{short} ({type(value).__name__})"
