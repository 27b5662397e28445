"""Column types: Spark DDL <-> Arrow types, and the families that types fall into.

Rules kept here:

* No Spark. A query is validated without a JVM, so DDL is parsed here rather than by Spark's own parser. What
  is accepted is what Spark's parser accepts, and the Arrow type is the one Spark's `to_arrow_type` gives
  (list child `element`, map children `key`/`value`, nullability, comments as Spark's field metadata), except
  that a timestamp's zone is always UTC.
* `parse_type(format_type(t)) == t` for every type `format_type` accepts; it refuses all others.
* A name occurs once per struct or schema, ignoring case, as Spark resolves names.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterable
from typing import ClassVar, NamedTuple, NoReturn

import pyarrow as pa

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

SUPPORTED_TYPES = (
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
        _syntax_error(self._ddl, token.start, f"{problem}; {SUPPORTED_TYPES}")

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
        _syntax_error(self._ddl, token.start, f"{token.text!r} is not a type; {SUPPORTED_TYPES}")

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
        f"found the Arrow type {t}, which Spark DDL has no words for; {SUPPORTED_TYPES}: cast it to one of these"
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


def describe_type(t: pa.DataType) -> str:
    """A type for an error message, where refusing to name it would hide the error."""
    try:
        return format_type(t)
    except UserError:
        return str(t)


# ----------------------------------------------------------------------------------------- families of types

_FAMILIES: tuple[tuple[str, Callable[[pa.DataType], bool]], ...] = (
    ("boolean", pa.types.is_boolean),
    ("integer", pa.types.is_integer),
    ("float", pa.types.is_floating),
    ("decimal", pa.types.is_decimal),
    ("string", pa.types.is_string),
    ("string", pa.types.is_large_string),
    ("string", pa.types.is_string_view),
    ("binary", pa.types.is_binary),
    ("binary", pa.types.is_large_binary),
    ("binary", pa.types.is_binary_view),
    ("binary", pa.types.is_fixed_size_binary),
    ("date", pa.types.is_date),
    ("timestamp_ntz", lambda t: pa.types.is_timestamp(t) and t.tz is None),
    ("timestamp", pa.types.is_timestamp),
    ("interval", pa.types.is_duration),
    ("map", pa.types.is_map),
    ("array", pa.types.is_list),
    ("array", pa.types.is_large_list),
    ("array", pa.types.is_fixed_size_list),
    ("array", pa.types.is_list_view),
    ("array", pa.types.is_large_list_view),
    ("struct", pa.types.is_struct),
    ("null", pa.types.is_null),
)

NESTED_FAMILIES = frozenset({"array", "map", "struct"})


def family_of(t: pa.DataType) -> str:
    """What the type's values are, whatever their width and layout; `other` if nothing that DDL knows."""
    return next((family for family, belongs in _FAMILIES if belongs(t)), "other")


def check_key_type(t: pa.DataType) -> None:
    """Refuse a type that cannot be a key: anything but a supported scalar."""
    if family_of(t) in NESTED_FAMILIES | {"null", "other"}:
        scalars = "a boolean, number, decimal, string, binary, date, timestamp or interval"
        raise UserError(
            f"found {describe_type(t)} as the type of a key; a key is {scalars}: use its parts as keys instead"
        )


def is_fixed_number(t: pa.DataType) -> bool:
    """Whether never-null arrays of the type are handed to users as NumPy: booleans, integers, floats."""
    return family_of(t) in ("boolean", "integer", "float")
