"""Every type at its limits through states, sources of files and SQLite: exact, or refused by name."""

from __future__ import annotations

import itertools
import json
import math
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flinkish_spark import (
    ForeachCheckpointSink,
    ForeachSink,
    JdbcSink,
    Json,
    KafkaSink,
    MemorySink,
    PrintSink,
    Raw,
    TwoPhaseCommitSink,
)
from flinkish_spark.connectors.files.output_formats import FileFormat, check_columns, read_schema
from flinkish_spark.connectors.formats.avro_format import derive_schema
from flinkish_spark.connectors.jdbc.dialect import record_json
from flinkish_spark.connectors.jdbc.types import is_supported
from flinkish_spark.connectors.kafka.record_encoder import check_columns as check_record
from flinkish_spark.core.errors import ConfigError, FlinkishError, SchemaError
from flinkish_spark.sources import CsvFiles, FileSource, JsonLines
from flinkish_spark.types.ddl import parse_ddl
from tests.support.databases import TestDatabase, context_of
from tests.support.effort import examples, sampled
from tests.support.types_at_limits import (
    FORMS,
    NOT_IN_ROWS,
    OF_SPARK,
    PLAIN,
    RULES,
    SINKS,
    SOURCES,
    SOURCES_OF_SPARK,
    STATES,
    Case,
    canonical,
    cases_of,
    columns_of,
    refused_types,
    same,
)
from tests.support.types_databases import back, through
from tests.support.types_files import FILES, column, read_files
from tests.support.types_states import STATE_WAYS

#: The same examples at every run; a failure is shown shrunk.
settings.register_profile("types", derandomize=True, max_examples=examples(40), deadline=None, database=None)
TYPES = [(form, kind) for form in FORMS for kind in PLAIN]


def refused(case: Case, error: BaseException) -> None:
    """Assert that an error says what it has to; its own words or those of what it was raised from."""
    import re

    said = f"{error} {error.__cause__ or ''}"
    assert case.refusal and re.search(case.refusal, said), f"{case.ddl}: {type(error).__name__}: {said:.600}"


def check(way: str, form: str, kind: str, send: Any) -> None:
    """Send a type's values in a form; `send` returns what came back, as often as it was read."""
    for case in cases_of(way, form, kind):
        try:
            read = send(case.ddl, case.given)
        except Exception as error:
            refused(case, error)
        else:
            assert not case.refusal, f"{way} takes {case.ddl}: {case.given!r:.200}"
            for found in read:
                same(found, case.wanted, case.ddl)


def test_ways_and_types_of_all_rules_are_there() -> None:
    known = {*SOURCES, *SOURCES_OF_SPARK, *STATES, *SINKS}
    for rule in RULES:
        assert set(rule.ways) <= known and set(rule.forms or ()) <= set(FORMS), rule.note
        assert set(rule.kinds or ()) <= set(PLAIN), rule.note
    assert set(STATE_WAYS) == set(STATES) and set(FILES) == set(SOURCES)


@pytest.mark.parametrize(("way", "form"), sampled(itertools.product(STATES, FORMS), one_in=3))
def test_states_hand_out_what_was_put_at_once_and_behind_a_restore(way: str, form: str) -> None:
    for kind in PLAIN:
        check(way, form, kind, STATE_WAYS[way])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("way", SOURCES)
def test_sources_read_what_is_there(way: str, form: str, tmp_path: Path) -> None:
    numbers = iter(range(10_000))

    def send(ddl: str, values: list[Any]) -> list[list[Any]]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        return [FILES[way](ddl, values, folder)]

    for kind in PLAIN:
        check(way, form, kind, send)


@pytest.mark.parametrize("form", FORMS)
def test_sqlite_has_what_was_written(form: str, tmp_path: Path) -> None:
    numbers = iter(range(10_000))

    def send(ddl: str, values: list[Any]) -> list[list[Any]]:
        folder = tmp_path / str(next(numbers))
        folder.mkdir()
        database = TestDatabase(f"jdbc:sqlite:{folder / 'database'}")
        try:
            return [through(database, {"v": (ddl, values)}, folder)["v"]]
        finally:
            database.close()

    for kind in PLAIN:
        check("SQLite", form, kind, send)


@pytest.mark.parametrize("form", FORMS)
def test_dead_letters_of_a_database_have_the_record_as_json(form: str) -> None:
    def send(ddl: str, values: list[Any]) -> list[list[Any]]:
        assert is_supported(parse_ddl(ddl)), "cannot write the field"
        batch = pa.RecordBatch.from_arrays([column(f"v {ddl}", values)], names=["v"])
        found = [json.loads(record_json(batch, row))["v"] for row in range(len(values))]
        return [[back(one, parse_ddl(ddl), in_json=True) for one in found]]

    for kind in PLAIN:
        check("DeadLetterTable", form, kind, send)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", NOT_IN_ROWS)
def test_types_that_python_does_not_have_are_refused_where_they_are_declared(kind: str, form: str) -> None:
    ddl = FORMS[form][0].format(kind)
    for way in STATES:
        with pytest.raises((FlinkishError, ValueError), match=r"(?i)interval|varchar|char|variant|keyed by"):
            STATE_WAYS[way](ddl, [None])
    with pytest.raises(SchemaError, match=r"(?i)interval|varchar|char|variant"):
        FILES["rows of SplitSource"](ddl, [None], Path("/nowhere"))


# -- numbers and times beyond a type, in files of texts -------------------------------------------------

#: A type, texts that are no values of it, and what the refusal says.
BEYOND = {
    "BYTE": ("128", "-129", "1.5", "1e2", "0x80", "0xFF"),
    "INT": ("2147483648", "1.0", "0xFFFFFFFF"),
    "LONG": ("9223372036854775808", "1e3", "0x1F"),
    "FLOAT": ("1e39", "-1e300", "3.5e38"),
    "DOUBLE": ("1e400", "-1e309"),
    "DECIMAL(10,2)": ("12.345", "100000000.00", "1e-9", "1e20"),
    "DECIMAL(38,0)": ("0.5", "1" + "0" * 38),
    "DATE": ("10000-01-01", "0000-01-01", "2026-02-30", "2026-01-01T00:00:00Z"),
    "TIMESTAMP": (
        "2026-01-01T00:00:00.1234567Z",
        "2026-01-01T24:00:00Z",
        "10000-01-01T00:00:00Z",
        "0000-01-01T00:00:00Z",
        "9999-12-31T23:59:59-01:00",
    ),
    "TIMESTAMP_NTZ": ("2026-01-01T00:00:00.1234567", "2026-01-01T00:00:00Z", "2026-01-01T00:00:00+02:00"),
}
_BARE = ("BYTE", "INT", "LONG", "FLOAT", "DOUBLE", "DECIMAL(10,2)", "DECIMAL(38,0)")
_NOT_READ = r"cannot be read as the schema says"


def _file(folder: Path, name: str, text: str, form: Any, kind: str) -> list[Any]:
    (folder / name).write_text(text, encoding="utf-8")
    return read_files(FileSource(str(folder), form, f"v {kind}", pattern=name), folder)


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in BEYOND.items() for text in texts])
def test_texts_that_a_type_would_cut_round_or_wrap_are_refused(kind: str, text: str, tmp_path: Path) -> None:
    value = text if kind in _BARE else f'"{text}"'
    with pytest.raises(RuntimeError, match=_NOT_READ):
        _file(tmp_path, "a.csv", f"v,n\n{text},1\n", CsvFiles(), kind)
    for form, line in (("{}", value), ("ARRAY<{}>", f"[{value}]"), ("STRUCT<v:{}>", f'{{"v":{value}}}')):
        folder = tmp_path / form[:3]
        folder.mkdir()
        with pytest.raises(RuntimeError, match="line 2 cannot be read"):
            _file(folder, "a.json", f'{{"v":null}}\n{{"v":{line}}}\n', JsonLines(), form.format(kind))


def test_numbers_beyond_a_float_are_found_behind_rows_that_say_infinity(tmp_path: Path) -> None:
    """A column with an infinite value is looked at again: one that says so stays, an overflow does not."""
    rows = "".join(f"{n}.5,1\n" for n in range(300_000))
    words = "v,n\n" + rows + " Infinity ,1\n-inf,1\n,1\nNaN,1\n0.1,1\n"
    found = _file(tmp_path, "a.csv", words, CsvFiles(), "DOUBLE")
    assert found[:300_000] == [n + 0.5 for n in range(300_000)]
    assert found[300_000:300_003] == [math.inf, -math.inf, None]
    assert math.isnan(found[300_003]) and found[300_004] == 0.1
    (tmp_path / "b").mkdir()
    with pytest.raises(RuntimeError, match=r"line 300007 .*1e309: that is too large for double"):
        _file(tmp_path / "b", "b.csv", words + "1e309,1\n", CsvFiles(), "DOUBLE")


def test_a_time_of_day_with_nanoseconds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"the field 'v' has 12:00:00.000000001.*no nanoseconds"):
        _file(tmp_path, "a.csv", "v,n\n12:00:00.000001,1\n12:00:00.000000001,2\n", CsvFiles(), "TIME(6)")


def test_bytes_that_are_no_base64_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        RuntimeError,
        match=r"line 2 cannot be read: its field 'v' is .*, which is no binary: a BINARY is no base64",
    ):
        _file(tmp_path, "a.json", '{"v":"YWI="}\n{"v":"a b"}\n', JsonLines(), "BINARY")


@pytest.mark.parametrize("kind", ["TIME(6)", "INTERVAL DAY TO SECOND", "ARRAY<TIME(6)>", "MAP<STRING,INT>"])
def test_json_lines_refuse_what_they_cannot_hold_where_they_are_made(kind: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="JSON files cannot hold the field 'v'"):
        FileSource(str(tmp_path), JsonLines(), f"v {kind}")


# -- types within types ---------------------------------------------------------------------------------


def _nested(depth: int) -> st.SearchStrategy[tuple[str, Any]]:
    """Types and values of them: what the table has, within each other."""
    plain = st.sampled_from(
        [(kind, one) for kind, limits in PLAIN.items() for name, one in limits.items() if name != "longest"]
    ).filter(lambda found: found[1] != PLAIN["INTERVAL DAY TO SECOND"]["least"])
    if depth == 0:
        return plain
    inner = _nested(depth - 1)
    return st.one_of(
        plain,
        inner.map(lambda one: (f"ARRAY<{one[0]}>", [one[1], None, one[1]])),
        inner.map(lambda one: (f"MAP<STRING,{one[0]}>", {"": one[1], "null": None})),
        st.tuples(inner, inner).map(
            lambda two: (f"STRUCT<a:{two[0][0]},b:{two[1][0]}>", {"a": two[0][1], "b": two[1][1]})
        ),
    )


@settings(settings.get_profile("types"))
@given(found=_nested(3))
def test_types_within_types_go_through_state_as_they_are(found: tuple[str, Any]) -> None:
    ddl, value = found
    for way in ("value state", "list state", "map state", "window"):
        for read in STATE_WAYS[way](ddl, [value, value]):
            same(read, [value, value], ddl)


@settings(settings.get_profile("types"))
@given(found=_nested(2))
def test_and_through_sources_of_one_s_own(found: tuple[str, Any], tmp_path_factory: Any) -> None:
    ddl, value = found
    for way in ("rows of SplitSource", "batches of SplitSource"):
        same(FILES[way](ddl, [value, None], tmp_path_factory.mktemp("own")), [value, None], ddl)


# -- the comparison itself ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ddl", "one", "other"),
    [
        ("DOUBLE", 0.0, -0.0),
        ("ARRAY<FLOAT>", [-0.0], [0.0]),
        ("LONG", 1, True),
        ("LONG", 1, 1.0),
        ("STRING", "", None),
        ("BINARY", b"", ""),
        ("DECIMAL(10,2)", Decimal("0.01"), 0.01),
        ("MAP<DOUBLE,STRING>", {0.0: "a"}, {-0.0: "a"}),
        ("STRUCT<v:INT>", {"v": None}, None),
        ("TIMESTAMP", PLAIN["TIMESTAMP"]["first"], PLAIN["TIMESTAMP_NTZ"]["first"]),
        ("DATE", PLAIN["DATE"]["first"], PLAIN["TIMESTAMP_NTZ"]["first"]),
    ],
)
def test_values_that_only_look_alike_are_told_apart(ddl: str, one: Any, other: Any) -> None:
    assert canonical(one, parse_ddl(ddl)) != canonical(other, parse_ddl(ddl))
    with pytest.raises(AssertionError):
        same([one], [other], ddl)


# -- what sinks refuse before the start -----------------------------------------------------------------


@pytest.mark.parametrize("way", ["Parquet files", "JSON files", "CSV files", "Avro files", "TEXT files"])
def test_file_sinks_take_what_they_can_hold_and_refuse_the_rest_before_the_start(way: str) -> None:
    form = FileFormat(way.split()[0].lower())
    for case in columns_of(way).values():
        check_columns(form, parse_ddl(f"v {case.ddl}"), (), "out")
    for case in refused_types(way):
        with pytest.raises(SchemaError, match=case.refusal):
            check_columns(form, parse_ddl(f"v {case.ddl}"), (), "out")


class Never(TwoPhaseCommitSink):
    """Is refused before anything of it is called."""

    def begin(self, *_: Any) -> None:
        raise AssertionError

    write = flush = commit = abort = begin


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", OF_SPARK)
def test_types_that_only_spark_has_are_refused_by_all_other_sinks_before_the_start(
    kind: str, form: str, tmp_path: Path
) -> None:
    """But by Delta, which only Spark can ask."""
    schema = parse_ddl(f"n INT, v {FORMS[form][0].format(kind)}")
    database = JdbcSink(f"jdbc:sqlite:{tmp_path / 'database'}", "t", create_table=True)
    called: dict[str, Any] = {
        "Memory": MemorySink("never"),
        "ForeachSink": ForeachSink(print),
        "ForeachCheckpointSink": ForeachCheckpointSink(print),
        "PrintSink": PrintSink(),
        "TwoPhaseCommitSink": Never(),
        **dict.fromkeys(("SQLite", "PostgreSQL", "MariaDB", "DeadLetterTable"), database),
    }
    for way in SINKS:
        if way in OF_SPARK[kind] or way.startswith("Delta "):
            continue
        with pytest.raises(SchemaError, match=r"the field '(v|v_v)'|, v "):
            if way.endswith(" files"):
                check_columns(FileFormat(way.split()[0].lower()), schema, (), "out")
            elif way == "Kafka Avro":
                derive_schema(schema)
            elif way.startswith("Kafka "):
                value = Json() if way == "Kafka Json" else Raw("v")
                check_record(KafkaSink("localhost:1", "out", value=value), schema, "out")
            else:
                called[way].preflight(None, context_of(tmp_path, schema))


def test_small_avro_files_are_merged_with_the_types_that_they_have() -> None:
    """Avro has no integers below INT: Spark writes none, and refuses to read any."""
    written = parse_ddl("a BYTE, b ARRAY<SHORT>, c MAP<STRING,BYTE>, d STRUCT<e:SHORT,f:LONG>")
    read = parse_ddl("a INT, b ARRAY<INT>, c MAP<STRING,INT>, d STRUCT<e:INT,f:LONG>")
    assert read_schema(FileFormat.AVRO, written) == read
    assert read_schema(FileFormat.PARQUET, written) == written
