"""JSON values and what they are as values of a type: exactly that, or bad. For every way to read JSON."""

from __future__ import annotations

from typing import NamedTuple

#: Column -> type. A case is a record with one field; the others are null.
TYPES = {
    "t": "TINYINT",
    "l": "LONG",
    "f": "FLOAT",
    "d": "DOUBLE",
    "n": "DECIMAL(10,2)",
    "n38": "DECIMAL(38,38)",
    "s": "STRING",
    "b": "BINARY",
    "day": "DATE",
    "at": "TIMESTAMP",
    "wall": "TIMESTAMP_NTZ",
    "span": "INTERVAL DAY TO SECOND",
    "months": "INTERVAL YEAR TO MONTH",
    "a": "ARRAY<DECIMAL(4,1)>",
    "m": "MAP<STRING, TIMESTAMP>",
    "x": "STRUCT<f: FLOAT, s: STRING>",
}
SCHEMA = ", ".join(f"{name} {kind}" for name, kind in TYPES.items())


class Case(NamedTuple):
    """A value in JSON, and the text that Spark shows of it with the time zone UTC."""

    column: str
    value: str
    shown: str

    @property
    def record(self) -> str:
        """The whole text."""
        return f'{{"{self.column}": {self.value}}}'


SPAN = "INTERVAL '1 02:03:04.000005' DAY TO SECOND"

EXACT = (
    Case("t", "-128", "-128"),
    Case("t", "127", "127"),
    Case("l", "9223372036854775807", "9223372036854775807"),
    Case("l", "-9223372036854775808", "-9223372036854775808"),
    Case("f", "3.4028235e38", "3.4028235E38"),
    Case("f", "0.1", "0.1"),
    Case("f", '"-Infinity"', "-Infinity"),
    Case("d", "1.7976931348623157e308", "1.7976931348623157E308"),
    Case("d", "NaN", "NaN"),
    Case("d", '"Infinity"', "Infinity"),
    Case("n", "12.34", "12.34"),
    Case("n", "12.340", "12.34"),
    Case("n", '"12.3"', "12.30"),
    Case("n", "1.2e1", "12.00"),
    Case("n", "99999999.99", "99999999.99"),
    Case("n", "-0.010", "-0.01"),
    Case("n", "0e999999999", "0.00"),
    Case("n", "1e-2", "0.01"),
    Case("n38", "0.12345678901234567890123456789012345678", "0.12345678901234567890123456789012345678"),
    Case("s", '"a\\u00e4\\ud83d\\ude00"', "aä😀"),
    Case("s", "0.12345678901234567890", "0.12345678901234567890"),
    Case("s", "1.50", "1.50"),
    Case("s", "true", "true"),
    Case("s", '{"k" : [1.10, 1e400, "q\\u001f\\""], "n": null}', '{"k":[1.10,1e400,"q\\u001F\\""],"n":null}'),
    Case("b", '"AAEC"', "\x00\x01\x02"),
    Case("day", '"0001-01-01"', "0001-01-01"),
    Case("day", '"9999-12-31"', "9999-12-31"),
    Case("at", '"2026-01-01T00:00:00.123456Z"', "2026-01-01 00:00:00.123456"),
    Case("at", '"2026-01-01T00:00:00.123456000Z"', "2026-01-01 00:00:00.123456"),
    # Of an hour that comes twice it is the first.
    Case("at", '"2026-10-25T02:30:00 Europe/Berlin"', "2026-10-25 00:30:00"),
    Case("at", '"2026-03-29T01:59:59 Europe/Berlin"', "2026-03-29 00:59:59"),
    Case("at", '"2026-10-25T02:30:00+02:00"', "2026-10-25 00:30:00"),
    Case("at", '"2026-10-25T02:30:00+01:00"', "2026-10-25 01:30:00"),
    Case("at", '"0001-01-01T00:00:00Z"', "0001-01-01 00:00:00"),
    Case("at", '"9999-12-31T23:59:59.999999Z"', "9999-12-31 23:59:59.999999"),
    Case("at", "1767225600", "2026-01-01 00:00:00"),
    Case("at", "-62135596800", "0001-01-01 00:00:00"),
    Case("at", "253402300799", "9999-12-31 23:59:59"),
    Case("wall", '"2026-01-01T00:00:00.000001"', "2026-01-01 00:00:00.000001"),
    Case("span", f'"{SPAN}"', SPAN),
    Case("months", "\"INTERVAL '-1-2' YEAR TO MONTH\"", "INTERVAL '-1-2' YEAR TO MONTH"),
    Case("a", "[1, null, 2.50]", "[1.0, null, 2.5]"),
    Case("m", '{"k": "2026-01-01T00:00:00.5Z", "l": null}', "{k -> 2026-01-01 00:00:00.5, l -> null}"),
    Case("x", '{"f": 1, "s": 1.0}', "{1.0, 1.0}"),
)

#: Column and value of what a type does not hold as it stands there.
BAD = (
    ("t", "128"),
    ("t", "255"),
    ("t", "-129"),
    ("f", "1e39"),
    ("f", "-3.5e38"),
    ("d", "1e400"),
    ("d", "-1e309"),
    ("n", "12.345"),
    ("n", "1e-9"),
    ("n", "100000000"),
    ("n", "1e999999999"),
    ("n", "1e-999999999"),
    ("n", '"12.345"'),
    ("n", '"1,5"'),
    ("n", '"1 "'),
    ("n", '""'),
    ("n", "NaN"),
    ("n38", "1"),
    ("s", '"\\ud83d"'),
    ("s", '"\\ude00\\ud83d"'),
    ("day", '"2026-01-01T23:00:00Z"'),
    ("day", '"10000-01-01"'),
    ("day", '"-0001-01-01"'),
    ("day", '"0000-12-31"'),
    ("at", "1767225600000"),
    ("at", "253402300800"),
    ("at", "-62135596801"),
    ("at", "9223372036854775807"),
    ("at", '"2026-01-01T00:00:00.1234567Z"'),
    ("at", '"2026-01-01T00:00:00.000000001Z"'),
    ("at", '"+10000-01-01T00:00:00Z"'),
    ("at", '"9999-12-31T23:59:59-01:00"'),
    ("at", '"0001-01-01T00:00:00+01:00"'),
    ("at", '"12:34:56"'),
    ("at", '"T12:34:56"'),
    ("at", '"2026-03-29T02:30:00 Europe/Berlin"'),
    ("at", '"2026-3-29 2:0:0Europe/Berlin"'),
    ("m", '{"k": "2018-11-04 00:59:59.5 America/Sao_Paulo"}'),
    ("wall", '"2026-01-01T00:00:00.1234567"'),
    ("span", '"soon"'),
    ("span", "\"INTERVAL '1 02:03:04.0000001' DAY TO SECOND\""),
    ("months", '"1"'),
    ("a", "[1.25]"),
    ("m", '{"k": 1767225600000}'),
    ("m", '{"k": null, "k": null}'),
    ("x", '{"f": 1e39}'),
    ("x", '{"f": 1, "f": 1}'),
)

#: Values that Spark's own parser does not take either.
NEVER = (
    ("l", "9223372036854775808"),
    ("l", "1.0"),
    ("l", "1e3"),
    ("l", '"1"'),
    ("d", '"1.5"'),
    ("b", '"?"'),
    ("day", "20454"),
    ("day", '"2026-02-30"'),
    ("at", "1767225600.5"),
    ("at", '"2026-01-01T25:00:00Z"'),
    ("wall", '"2026-01-01T00:00:00Z"'),
    ("wall", "1767225600"),
    ("a", "1"),
    ("m", "[]"),
    ("x", "[]"),
)

#: Texts that are not one object.
NOT_ONE = (
    '{"l":1}{"l":2}',
    '{"l":1} {"l":2}',
    '{"l":1}\n{"l":2}',
    '{"l":1},',
    '{"l":1},{"l":2}',
    '{"l":1}}',
    '{"l":1} trailing }',
    '{"l":1}\x00{}',
    '{"l":1,}',
    '[{"l":1}]',
    '{"l":1}[{}',
    '{"l":1,"l":2}',
    '{"\\u006c":1,"l":1}',
    '{"unknown":"\\udc00"}',
    '{"l":1,"unknown":Inf}',
    '{"l":1,"unknown":[-Inf]}',
    '{"l":1,"unknown":-NaN}',
    "1",
    '"{}"',
    "null",
    "",
    "{",
)
