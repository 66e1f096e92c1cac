"""Every type of Spark's at its limits, what each way through the product makes of it, and the table of that.

One place for all stages: unit tests (`tests/unit/types/test_types_at_limits.py`), those with Spark, those
with a broker. Values and outcomes are written by hand. A way that does something else fails its test, so the
table in `docs/field-reports.md` is what is.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from pyspark.sql import types as T

from flinkish_spark.types.ddl import parse_ddl

UTC = dt.UTC
_DAYS, _MICROS = 106_751_991, (4 * 3600 + 54) * 1_000_000 + 775_807

#: Values that stand for a type, as Python's functions have them; null comes with each of them.
PLAIN: dict[str, dict[str, Any]] = {
    "BOOLEAN": {"false": False, "true": True},
    "BYTE": {"least": -128, "zero": 0, "greatest": 127},
    "SHORT": {"least": -32_768, "greatest": 32_767},
    "INT": {"least": -2_147_483_648, "greatest": 2_147_483_647},
    # What a double cannot hold is in between.
    "LONG": {
        "least": -9_223_372_036_854_775_808,
        "2^53 + 1": 9_007_199_254_740_993,
        "greatest": 9_223_372_036_854_775_807,
    },
    "FLOAT": {
        "least": -3.4028234663852886e38,
        "greatest": 3.4028234663852886e38,
        "nearest to zero": 1.401298464324817e-45,
        "0.0": 0.0,
        "-0.0": -0.0,
        "NaN": math.nan,
        "Infinity": math.inf,
        "-Infinity": -math.inf,
    },
    "DOUBLE": {
        "least": -1.7976931348623157e308,
        "greatest": 1.7976931348623157e308,
        "nearest to zero": 5e-324,
        "0.1 + 0.2": 0.30000000000000004,
        "0.0": 0.0,
        "-0.0": -0.0,
        "NaN": math.nan,
        "Infinity": math.inf,
        "-Infinity": -math.inf,
    },
    "DECIMAL(10,2)": {
        "least": Decimal("-99999999.99"),
        "greatest": Decimal("99999999.99"),
        "one cent": Decimal("0.01"),
    },
    "DECIMAL(38,0)": {"least": Decimal("-" + "9" * 38), "greatest": Decimal("9" * 38)},
    "DECIMAL(38,38)": {"least": Decimal("-0." + "9" * 38), "nearest to zero": Decimal("0." + "0" * 37 + "1")},
    "STRING": {
        "empty": "",
        "longest": "x" * 70_000,
        "zero byte": "a\0b",
        "beyond 16 bits": "\U0001f600e\u0301",
        "ends of lines": "a\r\nb\n",
        "quotes": '"a\\",\'',
        "blanks": "  a\t",
        "words": "null",
        "a number": "007",
    },
    "BINARY": {"empty": b"", "every byte": bytes(range(256)), "longest": b"\xff\0" * 35_000},
    "DATE": {
        "first": dt.date(1, 1, 1),
        "before the calendar changed": dt.date(1582, 10, 4),
        "before 1970": dt.date(1969, 12, 31),
        "leap day": dt.date(2024, 2, 29),
        "last": dt.date(9999, 12, 31),
    },
    "TIMESTAMP": {
        "first": dt.datetime(1, 1, 1, tzinfo=UTC),
        "before the calendar changed": dt.datetime(1582, 10, 4, 23, 59, 59, 1, tzinfo=UTC),
        "a microsecond before 1970": dt.datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        "before clocks go forward": dt.datetime(2026, 3, 29, 0, 59, 59, 999_999, tzinfo=UTC),
        # In Berlin both are at half past two.
        "an hour that comes twice": dt.datetime(2026, 10, 25, 0, 30, 0, 123_456, tzinfo=UTC),
        "and again": dt.datetime(2026, 10, 25, 1, 30, 0, 123_456, tzinfo=UTC),
        "last": dt.datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    },
    "TIMESTAMP_NTZ": {
        "first": dt.datetime(1, 1, 1),
        "a microsecond before 1970": dt.datetime(1969, 12, 31, 23, 59, 59, 999_999),
        "an hour that Berlin does not have": dt.datetime(2026, 3, 29, 2, 30, 0, 123_456),
        "an hour that it has twice": dt.datetime(2026, 10, 25, 2, 30, 0, 1),
        "last": dt.datetime(9999, 12, 31, 23, 59, 59, 999_999),
    },
    "TIME(6)": {"first": dt.time(0, 0), "last": dt.time(23, 59, 59, 999_999)},
    "INTERVAL DAY TO SECOND": {
        "least": dt.timedelta(days=-_DAYS, microseconds=-_MICROS - 1),
        "a microsecond": dt.timedelta(microseconds=1),
        "greatest": dt.timedelta(days=_DAYS, microseconds=_MICROS),
    },
}
#: Types that functions of Python's, and so states, refuse by name, at any depth.
NOT_IN_ROWS = ("VARCHAR(3)", "CHAR(3)", "INTERVAL YEAR TO MONTH", "INTERVAL", "VARIANT")

#: Types that only Spark makes, in a transform or a frame, and the sinks that take them; others refuse.
OF_SPARK: dict[str, tuple[str, ...]] = {
    "INTERVAL YEAR TO MONTH": (
        *("Parquet files", "JSON files", "CSV files", "Avro files"),
        *("Kafka Json", "Kafka Raw"),
    ),
    "INTERVAL": (),
    "VARIANT": ("Delta append", "Delta upsert", "Delta overwrite", "Parquet files"),
}

#: The longest name that readers of JSON take: Jackson's limit, and so Spark's.
_LONGEST_NAME = 50_000


def _as_name(value: Any) -> Any:
    """Return a key of a map that JSON can have as a name."""
    return value[:_LONGEST_NAME] if isinstance(value, str) else value


#: Around a type: its declaration, and what is made of some of its values, by the names of these.
FORMS: dict[str, tuple[str, Callable[[Mapping[str, Any]], list[Any]]]] = {
    "by itself": ("{}", lambda limits: [*limits.values()]),
    "in ARRAY": ("ARRAY<{}>", lambda limits: [[*limits.values(), None], []]),
    "value of MAP": ("MAP<STRING,{}>", lambda limits: [{**limits, "null": None}, {}]),
    "key of MAP": ("MAP<{},STRING>", lambda limits: [*({_as_name(v): n} for n, v in limits.items()), {}]),
    "in STRUCT": ("STRUCT<v:{}>", lambda limits: [*({"v": v} for v in limits.values()), {"v": None}]),
}
_MAPS = ("value of MAP", "key of MAP")
_NESTED = tuple(form for form in FORMS if form != "by itself")
#: The null that stands for the whole value, as a limit of each type in each form.
NULL = "null"

_FILES = ("Parquet", "JSON", "CSV", "Avro")
#: Where what a sink has is what a function of the user's is given.
CALLED = ("ForeachSink", "ForeachCheckpointSink", "PrintSink", "TwoPhaseCommitSink")
SOURCES = (
    "rows of SplitSource",
    "batches of SplitSource",
    "ParquetFiles",
    "JsonLines",
    "CsvFiles",
    "TextLines",
    "CollectionSource",
)
SOURCES_OF_SPARK = ("DeltaSource", "DeltaTableSource", "Delta by from_dataframe")
STATES = (
    "value state",
    "list state",
    "map state",
    "key of map state",
    "reducing state",
    "aggregating state",
    "operator list state",
    "broadcast state",
    "key with a timer",
    "window",
    "interval join",
    "window join",
    "temporal join",
)
SINKS = (
    "Memory",
    "Delta append",
    "Delta upsert",
    "Delta overwrite",
    *(f"{form} files" for form in _FILES),
    "TEXT files",
    "SQLite",
    "PostgreSQL",
    "MariaDB",
    "DeadLetterTable",
    "Kafka Json",
    "Kafka Avro",
    "Kafka Raw",
    *CALLED,
)


@dataclass(frozen=True, eq=False)
class Rule:
    """What is not exact in some ways.

    Parameters
    ----------
    ways, forms, kinds
        Where it holds; ``None`` stands for all.
    note
        For the documents.
    limits
        Which values; None for the type as a whole.
    refusal
        What the refusal says; empty if there is none.
    becomes
        The other value that comes back, by the name of the limit.
    """

    ways: tuple[str, ...]
    forms: tuple[str, ...] | None
    kinds: tuple[str, ...] | None
    note: str
    limits: tuple[str, ...] | None = None
    refusal: str = ""
    becomes: Mapping[str, Any] | None = None

    def holds(self, way: str, form: str, kind: str) -> bool:
        """Return whether it is about a type in a form on a way."""
        return (
            way in self.ways
            and (self.forms is None or form in self.forms)
            and (self.kinds is None or kind in self.kinds)
        )


_FLOATS, _TIME, _INTERVAL = ("FLOAT", "DOUBLE"), ("TIME(6)",), ("INTERVAL DAY TO SECOND",)
_ALL_BUT_STRING = tuple(kind for kind in PLAIN if kind != "STRING")
_OWN = ("rows of SplitSource", "batches of SplitSource", "CollectionSource")

RULES: tuple[Rule, ...] = (
    Rule(
        STATES,
        None,
        _TIME,
        "wants `spark.sql.timeType.enabled=true`, without which Spark refuses the plan before the start",
        (),
    ),
    Rule(
        (*_OWN, "ParquetFiles", *SOURCES_OF_SPARK, *STATES, *SINKS),
        None,
        _INTERVAL,
        "an interval of less than -106,751,991 days is refused: Arrow does not make it of Python's",
        ("least",),
        r"cannot hold datetime|cannot hold \[|cannot hold \{|cannot hold \(|too large",
    ),
    Rule(
        ("JsonLines",),
        _MAPS,
        None,
        "a map is refused where the source is made",
        refusal="JSON files cannot hold the field",
    ),
    Rule(
        ("JsonLines",),
        None,
        _TIME + _INTERVAL,
        "times of day and intervals are refused where the source is made",
        refusal="JSON files cannot hold the field",
    ),
    Rule(
        ("CsvFiles",),
        _NESTED,
        None,
        "nested types are refused where the source is made",
        refusal="CSV files cannot hold the field",
    ),
    Rule(
        ("CsvFiles",),
        None,
        _INTERVAL,
        "intervals are refused where the source is made",
        refusal="CSV files cannot hold the field",
    ),
    Rule(
        ("CsvFiles",),
        ("by itself",),
        ("STRING",),
        "null comes back as the empty text: a cell of CSV has no other",
        (NULL,),
        becomes={NULL: ""},
    ),
    Rule(
        ("CsvFiles",),
        ("by itself",),
        ("BINARY",),
        "null comes back as no bytes",
        (NULL,),
        becomes={NULL: b""},
    ),
    Rule(
        ("TextLines",),
        None,
        _ALL_BUT_STRING,
        "one STRING is all that a line holds; other types are refused where the source is made",
        refusal="text files have one field",
    ),
    Rule(
        ("TextLines",),
        _NESTED,
        None,
        "one STRING is all that a line holds; other types are refused where the source is made",
        refusal="text files have one field",
    ),
    Rule(
        ("TextLines",),
        ("by itself",),
        ("STRING",),
        "a line has no null, and a text with ends of lines is several",
        (NULL, "ends of lines"),
    ),
    Rule(
        ("key of map state",),
        ("by itself",),
        None,
        "null is no key of a map",
        (NULL,),
        "cannot have the key None",
    ),
    Rule(
        ("key of map state",),
        _NESTED,
        None,
        "nested types are refused as keys of a map, where the state is declared",
        refusal="A key of a map is a scalar",
    ),
    Rule(
        ("key of map state",),
        ("by itself",),
        _FLOATS,
        "-0.0 is the key 0.0",
        ("-0.0",),
        becomes={"-0.0": 0.0},
    ),
    Rule(
        ("list state", "broadcast state"),
        None,
        None,
        "null is refused as an element of a list state and as a value of broadcast state",
        (NULL,),
        "state takes no None",
    ),
    Rule(
        ("key with a timer",),
        ("by itself",),
        _FLOATS,
        "floats are refused as keys when the job is made",
        refusal="cannot be compared reliably",
    ),
    Rule(
        ("key with a timer",),
        _NESTED,
        None,
        "nested types are refused as keys when the job is made",
        refusal="cannot be compared reliably",
    ),
    Rule(
        ("SQLite", "PostgreSQL", "MariaDB", "DeadLetterTable"),
        None,
        _TIME + _INTERVAL,
        "times of day and intervals are refused before the start",
        refusal="cannot write the field",
    ),
    Rule(
        tuple(f"{form} files" for form in _FILES),
        None,
        _TIME,
        "times of day are refused before the start: Spark writes none",
        refusal="The format has no time",
    ),
    Rule(
        ("CSV files",),
        _NESTED,
        None,
        "nested types are refused before the start",
        refusal="A CSV column cannot hold",
    ),
    Rule(
        ("CSV files",),
        ("by itself",),
        ("BINARY",),
        "binary is refused before the start: Spark would write a list of hexadecimal numbers",
        refusal="A CSV column holds text",
    ),
    Rule(
        ("CSV files",),
        ("by itself",),
        ("STRING",),
        "null comes back as the empty text: a cell of CSV has no other",
        (NULL,),
        becomes={NULL: ""},
    ),
    Rule(
        ("TEXT files",),
        None,
        _ALL_BUT_STRING,
        "one STRING is all that a line holds; other types are refused before the start",
        refusal="A text file holds one string column",
    ),
    Rule(
        ("TEXT files",),
        _NESTED,
        None,
        "one STRING is all that a line holds; other types are refused before the start",
        refusal="A text file holds one string column",
    ),
    Rule(
        ("TEXT files",),
        ("by itself",),
        ("STRING",),
        "null comes back as the empty text; a text with ends of lines is a bad record",
        (NULL, "ends of lines"),
        becomes={NULL: ""},
    ),
    Rule(
        ("JSON files", "Kafka Json", "Kafka Raw"),
        ("key of MAP",),
        _ALL_BUT_STRING,
        "keys of a map are STRING in JSON; others are refused before the start",
        refusal="keys of a map must be STRING",
    ),
    Rule(
        ("Avro files", "Kafka Avro"),
        ("key of MAP",),
        _ALL_BUT_STRING,
        "keys of a map are STRING in Avro; others are refused before the start",
        refusal="Keys of a map are STRING in Avro|cannot be written as Avro",
    ),
    Rule(
        ("Kafka Json", "Kafka Raw"),
        None,
        _TIME,
        "times of day are refused before the start: no JSON says exactly what they are",
        refusal="cannot be written exactly",
    ),
    Rule(
        ("Kafka Avro",),
        None,
        _TIME + _INTERVAL,
        "times of day and intervals are refused before the start",
        refusal="cannot be written as Avro",
    ),
    Rule(
        ("Delta append", "Delta upsert", "Delta overwrite", *SOURCES_OF_SPARK),
        None,
        _TIME + _INTERVAL,
        "Delta has no times of day nor intervals: refused before the start",
        refusal="which Delta has not",
    ),
    Rule(
        ("SQLite", "MariaDB"),
        ("by itself",),
        _FLOATS,
        "-0.0 is stored as 0.0",
        ("-0.0",),
        becomes={"-0.0": 0.0},
    ),
    Rule(
        ("SQLite",),
        ("by itself",),
        _FLOATS,
        "NaN is a refused record: SQLite would store NULL",
        ("NaN",),
        "SQLite would store NaN as NULL",
    ),
    Rule(
        ("MariaDB",),
        ("by itself",),
        _FLOATS,
        "NaN and the infinities are refused records",
        ("NaN", "Infinity", "-Infinity"),
        "MySQL has no NaN and no infinity",
    ),
    Rule(
        ("PostgreSQL",),
        _NESTED,
        _FLOATS,
        "-0.0 is 0 in `jsonb`",
        ("-0.0",),
        becomes={"-0.0": 0.0},
    ),
    Rule(
        ("PostgreSQL",),
        None,
        ("STRING",),
        "a text with a zero byte is a refused record",
        ("zero byte",),
        r"NUL \(0x00\)|u0000 cannot be converted",
    ),
)


@dataclass(frozen=True)
class Case:
    """Values that go one way together, and what comes of them.

    Parameters
    ----------
    ddl
        Their declaration.
    given, wanted
        The values, and what comes back; these are nothing if there is a refusal.
    refusal
        What it says.
    """

    ddl: str
    given: list[Any]
    wanted: list[Any]
    refusal: str


def cases_of(way: str, form: str, kind: str) -> Iterator[Case]:
    """Yield what is to be sent of a type in a form: all that is exact together, each refused value alone."""
    ddl, make = FORMS[form][0].format(kind), FORMS[form][1]
    rules = [rule for rule in RULES if rule.holds(way, form, kind)]
    if whole := [rule.refusal for rule in rules if rule.limits is None]:
        yield Case(ddl, make(PLAIN[kind]), [], "|".join(whole))
        return
    special = {limit: rule for rule in rules for limit in rule.limits or ()}
    becomes = {limit: one for rule in rules for limit, one in (rule.becomes or {}).items()}
    limits = {name: one for name, one in PLAIN[kind].items() if name not in special or name in becomes}
    nulls = [] if NULL in special and NULL not in becomes else [None]
    wanted = make({name: becomes.get(name, one) for name, one in limits.items()})
    yield Case(ddl, [*make(limits), *nulls], [*wanted, *(becomes.get(NULL, one) for one in nulls)], "")
    for name, rule in special.items():
        if rule.refusal and (name == NULL or name in PLAIN[kind]):
            one = [None] if name == NULL else make({name: PLAIN[kind][name]})
            yield Case(ddl, one, [], rule.refusal)


def columns_of(way: str) -> dict[str, Case]:
    """Return a column for each form of each type that is not refused on a way, with what is exact."""
    found = {f"c{at}": case for at, case in enumerate(_first_cases(way))}
    return {name: case for name, case in found.items() if not case.refusal}


def sample_of(columns: dict[str, Case]) -> dict[str, Case]:
    """Return of these columns each type by itself, and in one of the other forms in turn."""
    found = {name: divmod(int(name.removeprefix("c")), len(PLAIN)) for name in columns}
    return {
        name: columns[name] for name, (form, kind) in found.items() if form in (0, 1 + kind % len(_NESTED))
    }


def refused_types(way: str) -> list[Case]:
    """Return the types that are refused as a whole on a way."""
    return [case for case in _first_cases(way) if case.refusal]


def _first_cases(way: str) -> list[Case]:
    return [next(cases_of(way, form, kind)) for form in FORMS for kind in PLAIN]


def canonical(value: Any, kind: T.DataType) -> Any:
    """Return a value so that two are equal if, and only if, they are the same value of a type.

    -0.0 is not 0.0, NaN is NaN, of a TIMESTAMP the instant counts, and a value of another class is another.

    Examples
    --------
    >>> canonical(-0.0, T.DoubleType()) == canonical(0.0, T.DoubleType())
    False
    """
    if value is None:
        return None
    match kind:
        case T.ArrayType():
            return [canonical(one, kind.elementType) for one in value]
        case T.MapType():
            pairs = value.items() if isinstance(value, dict) else value
            return sorted(
                [[canonical(k, kind.keyType), canonical(v, kind.valueType)] for k, v in pairs], key=repr
            )
        case T.StructType():
            parts = [value[name] for name in kind.names] if isinstance(value, dict) else list(value)
            return {
                field.name: canonical(one, field.dataType) for field, one in zip(kind, parts, strict=True)
            }
        case T.FloatType() | T.DoubleType() if isinstance(value, float):
            return "NaN" if math.isnan(value) else struct.pack("<d", value).hex()
        case T.DecimalType() if isinstance(value, Decimal):
            return f"{value.as_integer_ratio()}"
        case T.BinaryType() if isinstance(value, bytes | bytearray):
            return bytes(value).hex()
        case T.TimestampType() if isinstance(value, dt.datetime) and value.tzinfo is not None:
            return value.astimezone(UTC).isoformat()
        case T.TimestampNTZType() if isinstance(value, dt.datetime) and value.tzinfo is None:
            return value.isoformat()
    return f"{type(value).__name__} {value!r}"


def same(found: Iterable[Any], wanted: Iterable[Any], ddl: str) -> None:
    """Assert that values are those that they have to be, one by one."""
    kind = parse_ddl(ddl)
    found, wanted = list(found), list(wanted)
    wrong = [
        (one, other)
        for one, other in zip(found, wanted, strict=False)
        if canonical(one, kind) != canonical(other, kind)
    ]
    said = "; ".join(f"{one!r:.120} in the place of {other!r:.120}" for one, other in wrong)
    assert len(found) == len(wanted) and not wrong, f"{ddl}: {len(found)} of {len(wanted)}: {said}"


# -- the table of docs/field-reports.md ---------------------------------------------------------------------

_AS_PARTS = {
    "in ARRAY": "ARRAY of them",
    "value of MAP": "MAP to them",
    "key of MAP": "MAP by them",
    "in STRUCT": "STRUCT of them",
}


def types_table() -> str:
    """Return what is exact and what is refused, for the documents."""
    notes: dict[str, int] = {}
    parts = [
        _table(title, ways, notes)
        for title, ways in (
            ("out of a source", SOURCES + SOURCES_OF_SPARK),
            ("through state, a snapshot and a restore", STATES),
            ("into a sink and back", SINKS),
        )
    ]
    parts.append(_table_of_spark())
    return "\n\n".join([*parts, "\n".join(f"{number}. {note}" for note, number in notes.items())])


def _table(title: str, ways: Sequence[str], notes: dict[str, int]) -> str:
    """Name what is not exact by itself; ways that have the same exceptions share a line."""
    lines: dict[str, list[str]] = {}
    for way in ways:
        cells = {kind: _cell(_rules(way, "by itself", kind), notes) for kind in PLAIN}
        cells |= {words: _cell_of_form(way, form, notes) for form, words in _AS_PARTS.items()}
        lines.setdefault(_exceptions(cells), []).append(way)
    rows = [f"| {', '.join(ways)} | {exceptions} |" for exceptions, ways in lines.items()]
    return "\n".join([f"| {title} | all types are exact, but |", "|---|---|", *rows])


def _exceptions(cells: dict[str, str]) -> str:
    types: dict[str, list[str]] = {}
    for kind, cell in cells.items():
        if cell != "exact":
            types.setdefault(cell, []).append(kind)
    parts = []
    for cell, kinds in types.items():
        named = "all others" if len(kinds) > len(cells) / 2 else ", ".join(kinds)
        parts.append((len(kinds) > len(cells) / 2, f"{named}: {cell}"))
    return "; ".join(part for _, part in sorted(parts, key=lambda part: part[0])) or "none"


def _table_of_spark() -> str:
    """Say what becomes of types that Python does not have."""
    lines = ["| made by Spark, into a sink and back | exact | refused |", "|---|---|---|"]
    for kind, exact in OF_SPARK.items():
        taken = [way for way in SINKS if way in exact]
        lines.append(
            f"| {kind} | {', '.join(taken) or 'nowhere'} | {'all others' if taken else 'everywhere'} |"
        )
    return "\n".join(lines)


def _rules(way: str, form: str, kind: str) -> list[Rule]:
    return [rule for rule in RULES if rule.holds(way, form, kind)]


def _cell(rules: Sequence[Rule], notes: dict[str, int]) -> str:
    if not rules:
        return "exact"
    # A type that is refused as a whole has no values to speak of.
    whole = [rule for rule in rules if rule.limits is None]
    numbers = sorted({notes.setdefault(rule.note, len(notes) + 1) for rule in whole or rules})
    word = "refused" if whole else "exact"
    return f"{word} ({', '.join(map(str, numbers))})"


def _cell_of_form(way: str, form: str, notes: dict[str, int]) -> str:
    """Say of a form what is not said of its types already."""
    found = [rule for kind in PLAIN for rule in _rules(way, form, kind) if rule.forms is not None]
    return _cell(list(dict.fromkeys(found)), notes)
