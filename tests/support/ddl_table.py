"""Declarations, and what Spark's parser makes of them (`tests/integration/spark/test_declared_types.py`)."""

from __future__ import annotations

from typing import Any

from pyspark.sql import types as T

_LONG, _INT, _TEXT = T.LongType(), T.IntegerType(), T.StringType()


def fields(*declared: tuple[Any, ...]) -> T.StructType:
    """Return a StructType of names, types, and maybe whether a field may be null and its comment."""
    return T.StructType([_field(*one) for one in declared])


def _field(name: str, kind: T.DataType, nullable: bool = True, comment: str | None = None) -> T.StructField:
    return T.StructField(name, kind, nullable, None if comment is None else {"comment": comment})


READ: dict[str, T.DataType] = {
    "LONG": _LONG,
    "a LONG NOT NULL, b STRING": fields(("a", _LONG, False), ("b", _TEXT)),
    "a: LONG NOT NULL, b INT": fields(("a", _LONG, False), ("b", _INT)),
    "a:INT,b:STRING": fields(("a", _INT), ("b", _TEXT)),
    "a LONG COMMENT 'it''s', b INT": fields(("a", _LONG, True, "it's"), ("b", _INT)),
    r"a LONG COMMENT 'say \'x\'\n'": fields(("a", _LONG, True, "say 'x'\n")),
    "a LONG COMMENT \"double 'q'\"": fields(("a", _LONG, True, "double 'q'")),
    "a LONG COMMENT 'a' 'b'": fields(("a", _LONG, True, "ab")),
    r"a LONG COMMENT r'x\ny'": fields(("a", _LONG, True, r"x\ny")),
    "a LONG NOT NULL COMMENT 'both'": fields(("a", _LONG, False, "both")),
    "a STRUCT<a: INT>COMMENT 'x', b INT": fields(("a", fields(("a", _INT)), True, "x"), ("b", _INT)),
    "a LONG /* not, this */, b INT -- nor this": fields(("a", _LONG), ("b", _INT)),
    "STRUCT<x LONG>": fields(("x", _LONG)),
    "STRUCT<x: INT NOT NULL COMMENT 'a', y STRING>": fields(("x", _INT, False, "a"), ("y", _TEXT)),
    "ARRAY<STRUCT<b: MAP<STRING, ARRAY<INT>>>>": T.ArrayType(
        fields(("b", T.MapType(_TEXT, T.ArrayType(_INT))))
    ),
    "`a b` LONG, `c``d` INT, `e.f` INT, `ä` INT": fields(
        ("a b", _LONG), ("c`d", _INT), ("e.f", _INT), ("ä", _INT)
    ),
    "STRUCT<`a b`: INT>": fields(("a b", _INT)),
    "1a LONG, _1 LONG, _ LONG": fields(("1a", _LONG), ("_1", _LONG), ("_", _LONG)),
    "date DATE, timestamp TIMESTAMP": fields(("date", T.DateType()), ("timestamp", T.TimestampType())),
    "struct STRING, structure STRING, map LONG": fields(
        ("struct", _TEXT), ("structure", _TEXT), ("map", _LONG)
    ),
    "struct: INT": fields(("struct", _INT)),
    "INT INT": fields(("INT", _INT)),
    "interval STRING, array INT": fields(("interval", _TEXT), ("array", _INT)),
    "select INT, from INT, not INT, null INT, comment INT, order INT, end INT": fields(
        *((name, _INT) for name in ("select", "from", "not", "null", "comment", "order", "end"))
    ),
    "VARCHAR(10)": T.VarcharType(10),
    "a VARCHAR( 10 ), b CHAR(3), c CHARACTER(4)": fields(
        ("a", T.VarcharType(10)), ("b", T.CharType(3)), ("c", T.CharType(4))
    ),
    "STRING COLLATE UTF8_BINARY": _TEXT,
    "STRING COLLATE UTF8_LCASE": T.StringType("UTF8_LCASE"),
    "TIMESTAMP_LTZ": T.TimestampType(),
    "TIMESTAMP_NTZ": T.TimestampNTZType(),
    "TIMESTAMP WITHOUT TIME ZONE": T.TimestampNTZType(),
    "TIMESTAMP WITH LOCAL TIME ZONE": T.TimestampType(),
    "TIME": T.TimeType(6),
    "TIME(3)": T.TimeType(3),
    "TIME WITHOUT TIME ZONE": T.TimeType(6),
    "DEC": T.DecimalType(10, 0),
    "DEC(5,2)": T.DecimalType(5, 2),
    "NUMERIC(5)": T.DecimalType(5, 0),
    "DECIMAL( 5 , 2 )": T.DecimalType(5, 2),
    "INTERVAL": T.CalendarIntervalType(),
    "INTERVAL YEAR": T.YearMonthIntervalType(0, 0),
    "INTERVAL YEAR TO MONTH": T.YearMonthIntervalType(0, 1),
    "INTERVAL DAY": T.DayTimeIntervalType(0, 0),
    "INTERVAL DAY TO SECOND": T.DayTimeIntervalType(0, 3),
    "interval minute to second": T.DayTimeIntervalType(2, 3),
    "a INTERVAL HOUR TO MINUTE NOT NULL, b INT": fields(
        ("a", T.DayTimeIntervalType(1, 2), False), ("b", _INT)
    ),
    "VOID": T.NullType(),
    "a VARIANT NOT NULL": fields(("a", T.VariantType(), False)),
    "BYTE": T.ByteType(),
    "REAL": T.FloatType(),
    "BINARY": T.BinaryType(),
}

#: Of these what Spark 4.1 does not read; we do, whatever runs.
NEW_IN_4_2 = ("TIMESTAMP WITH LOCAL TIME ZONE",)

#: What neither of both reads.
REFUSED = (
    "LONGISH",
    "a LONG,",
    ", a LONG",
    "ARRAY<LONG",
    "ARRAY<>",
    "ARRAY<INT NOT NULL>",
    "MAP<STRING>",
    "map<int, boolean>>",
    "a LONG b",
    "a LONG b INT",
    "a !",
    "a",
    "1 LONG",
    "a-b LONG",
    "a.b LONG",
    "ä LONG",
    '"a" LONG',
    "LONG NOT NULL",
    "LONG COMMENT 'x'",
    "a LONG COMMENT x",
    "a LONG COMMENT 'x' NOT NULL",
    "a LONG NOT",
    "a LONG NULL",
    "a LONG DEFAULT 3",
    "VARCHAR",
    "CHAR",
    "STRING(3)",
    "LONG(3)",
    "TIMESTAMP(3)",
    "TIME(7)",
    "DECIMAL()",
    "DECIMAL(39,2)",
    "DECIMAL(2,5)",
    "DECIMAL(5,-2)",
    "INTERVAL MONTH TO YEAR",
    "INTERVAL DAY TO DAY",
    "INTERVAL DAY TO YEAR",
    "NULL",
    "OBJECT",
    "STRUCT<a: INT>, b INT",
)

#: What Spark reads, and we do not: it holds nothing, or nothing that Python sees.
ONLY_SPARKS = ("", "STRUCT<>", "DECIMAL(0)", "`` INT", "GEOMETRY(4326)", "GEOGRAPHY(4326)")
