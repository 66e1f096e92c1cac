"""What a Delta sink concludes from values: fits, types, retention, modes, names of folders and notes."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flinkish_spark import (
    CheckpointConfig,
    DeltaSink,
    OverwritePartitions,
    SchemaEvolution,
    Upsert,
)
from flinkish_spark.connectors.delta.files import TableFiles
from flinkish_spark.connectors.delta.sink import FILES, MARKERS, check_retention, duration_ms
from flinkish_spark.connectors.delta.sink_settings import PARQUET_CODECS, file_options
from flinkish_spark.connectors.delta.table import (
    Append,
    TableInfo,
    app_id,
    checkpoint_note,
    fit,
    is_wider,
    list_stored_names,
    mark_in,
    why_not_as_files,
    why_stricter,
)
from flinkish_spark.connectors.delta.writer import FilesToWrite
from flinkish_spark.connectors.write_modes import mode_from_json
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.timeline import Mark
from tests.support.sinks import sink_context_of

NONE, ADD, WIDEN = SchemaEvolution.NONE, SchemaEvolution.ADD_COLUMNS, SchemaEvolution.WIDEN_TYPES
JOB = JobUuid("a" * 32)


def column(name, kind="string", nullable=True, **metadata):
    return {"name": name, "type": kind, "nullable": nullable, "metadata": metadata}


def struct(*fields):
    return {"type": "struct", "fields": list(fields)}


def array(kind):
    return {"type": "array", "elementType": kind, "containsNull": True}


def table(*fields, partition_by=(), **properties):
    return TableInfo(fields, tuple(partition_by), properties)


@pytest.mark.parametrize(
    "have,stream,evolution,problem,changes",
    [
        ([column("a")], [column("A")], NONE, "", ()),
        ([column("a", "long")], [column("a", "integer")], NONE, "", ()),
        ([column("a", "long")], [column("a", "string")], WIDEN, "a is long in the table and string", ()),
        ([column("a")], [column("a"), column("b")], NONE, "no column b", ()),
        ([column("a")], [column("a"), column("b")], ADD, "", ("b",)),
        ([column("a", struct(column("x")))], [column("a", struct(column("y")))], ADD, "", ("a.y",)),
        ([column("a", array("long"))], [column("a", array("integer"))], NONE, "a.elementType", ()),
        ([column("a", array(struct(column("x"))))], [column("a", array(struct(column("x"))))], NONE, "", ()),
        ([column("a", array("long"))], [column("a", "long")], WIDEN, "another type", ()),
        (
            [column("a", "integer")],
            [column("a", "long")],
            WIDEN,
            "does not have delta.enableTypeWidening",
            (),
        ),
        ([column("a"), column("b", nullable=False)], [column("a")], NONE, "lacks the column b", ()),
        (
            [column("a"), column("b", struct(column("y", nullable=False)))],
            [column("a")],
            NONE,
            "lacks the column b.y, which is NOT NULL",
            (),
        ),
        (
            [column("a", struct(column("x"), column("y", nullable=False)))],
            [column("a", struct(column("x")))],
            ADD,
            "lacks the field a.y, which is NOT NULL",
            (),
        ),
        (
            [column("a", struct(column("x", nullable=False)))],
            [column("a", struct(column("x")))],
            NONE,
            "",
            (),
        ),
        # Of what is in arrays and maps Delta checks nothing.
        (
            [column("a", array(struct(column("x", nullable=False))))],
            [column("a", array(struct(column("x"))))],
            NONE,
            "a.elementType.x can hold nulls in the stream and not in the table",
            (),
        ),
        (
            [column("a", {**array("long"), "containsNull": False})],
            [column("a", array("long"))],
            NONE,
            "a can hold nulls",
            (),
        ),
        (
            [column("a"), column("b", nullable=False, CURRENT_DEFAULT="1")],
            [column("a")],
            NONE,
            "",
            (),
        ),
    ],
)
def test_what_a_table_lacks_for_a_stream(have, stream, evolution, problem, changes):
    found = fit(table(*have), stream, evolution)
    assert (problem in found.problems[0]) if problem else not found.problems
    assert found.changes == changes


def test_rules_of_fields_within_structs_are_rules_of_the_table():
    invariant = {"delta.invariants": json.dumps({"expression": {"expression": "s.a > 3"}})}
    inner = struct(column("a", nullable=False, **invariant), column("n", struct(column("b", nullable=False))))
    chars = {"__CHAR_VARCHAR_TYPE_STRING": "array<varchar(2)>"}
    found = table(
        column("id", nullable=False, **{"delta.invariants": "of another form"}),
        column("s", inner),
        column("l", array("string"), **chars),
        **{"delta.constraints.c": "s.a < 9"},
    )
    assert found.rules() == {
        "checks": {
            "c": "s.a < 9",
            "delta.invariants of id": "of another form",
            "delta.invariants of s.a": "s.a > 3",
        },
        "not_null": {"id": ["id"], "s.a": ["s", "a"], "s.n.b": ["s", "n", "b"]},
        "generated": {},
        "lengths": {"l": "array<varchar(2)>"},
    }


def test_types_widen_only_where_the_table_allows_it():
    narrow = table(column("a", "integer"), **{"delta.enableTypeWidening": "true"})
    stream = [column("a", "long")]
    assert fit(narrow, stream, WIDEN).changes == ("a",)
    assert fit(narrow, stream, ADD).problems and fit(narrow, stream, NONE).problems
    assert is_wider("decimal(5,2)", "decimal(8,4)") and not is_wider("decimal(5,2)", "decimal(6,4)")
    assert is_wider("date", "timestamp_ntz") and not is_wider("long", "double")


def metadata(*fields, partition_by=(), **configuration):
    inner = {
        "schemaString": json.dumps(struct(*fields)),
        "partitionColumns": list(partition_by),
        "configuration": configuration,
    }
    return {"metaData": inner}


PHYSICAL = "delta.columnMapping.physicalName"


@pytest.mark.parametrize(
    "current,why",
    [
        (metadata(column("a"), column("b")), ""),
        # Renamed: the files have it under the physical name.
        (metadata(column("z", **{PHYSICAL: "a"})), ""),
        (metadata(column("a", comment="new")), ""),
        # Dropped and added again under the same name.
        (metadata(column("a", **{PHYSICAL: "other"})), "column a changed"),
        (metadata(column("a", "long")), "column a changed"),
        (metadata(column("b")), "column a changed"),
        (metadata(column("a"), column("p"), partition_by=["p"]), "partitioning changed"),
        (metadata(column("a", nullable=False)), "became NOT NULL"),
        (metadata(column("a"), **{"delta.constraints.c": "a > 0"}), "constraint c"),
        (metadata(column("a"), column("n", **{"delta.identity.start": 1})), "numbers its rows"),
        (metadata(column("a"), column("g", **{"delta.generationExpression": "a"})), "generated column g"),
    ],
)
def test_whether_staged_files_can_be_named_in_a_table_that_changed(current, why):
    found = why_not_as_files(metadata(column("a")), current, ["a"])
    assert (why in found) if why else not found


def test_columns_that_the_stream_does_not_have_do_not_matter():
    assert not why_not_as_files(metadata(column("a"), column("b")), metadata(column("a")), ["a"])


def test_fewer_rules_than_at_staging_are_fine():
    strict = table(column("a", nullable=False), **{"delta.constraints.c": "a > 0"})
    assert not why_stricter(strict.rules(), table(column("a")))
    assert not why_stricter(json.loads(json.dumps(strict.rules())), strict)


@pytest.mark.parametrize(
    "text,ms",
    [
        ("interval 1 week", 604_800_000),
        ("INTERVAL 1 DAY 2 hours", 93_600_000),
        ("30 days", 2_592_000_000),
        ("interval 1.5 seconds", 1_500),
        ("interval 1 month", None),
        ("soon", None),
        ("", None),
    ],
)
def test_intervals_of_table_properties(text, ms):
    assert duration_ms(text) == ms


def context():
    checkpoint = CheckpointConfig(interval_ms=60_000, restart_budget_ms=60_000)
    return sink_context_of(JOB, OwnerEpoch(1), "table", None, checkpoint)


def test_retention_of_the_table_counts_and_of_a_new_one_the_sessions():
    short, long = "interval 119 seconds", "interval 120 seconds"
    check_retention(FILES, {f"delta.{FILES}": long}, {FILES: short}, "/t", context())
    check_retention(FILES, {"delta.other": "x"}, {FILES: short}, "/t", context())
    check_retention(MARKERS, {}, {}, "/t", context())
    for properties, defaults in [({f"delta.{FILES}": short}, {}), ({}, {FILES: short})]:
        with pytest.raises(ConfigError, match=r"119000 ms, shorter than .* = 120000 ms"):
            check_retention(FILES, properties, defaults, "/t", context())


@pytest.mark.parametrize(
    "mode",
    [
        Append(),
        OverwritePartitions(),
        Upsert(("a",)),
        Upsert(("a", "b"), sequence_by="t", delete_when="op = 'D'", not_stored=("op", "t")),
    ],
)
def test_a_mode_survives_its_stored_form(mode):
    assert mode_from_json(json.loads(json.dumps(mode.to_json()))) == mode
    with pytest.raises(ValueError, match="newer version"):
        mode_from_json({"kind": "SOMETHING"})


def test_what_is_not_stored():
    assert list_stored_names(Upsert(("a",), not_stored=("op",)), ["a", "op", "b"]) == ("a", "b")


@pytest.mark.parametrize(
    "make,message",
    [
        (lambda: Upsert(()), "no keys"),
        (lambda: Upsert("id"), "keys is 'id'"),
        (lambda: Upsert(("a",), not_stored=("a",)), "not stored"),
        (lambda: DeltaSink("/t", mode="append"), "mode is 'append'"),
        (lambda: DeltaSink("/t", mode=Upsert), "mode is"),
        (lambda: DeltaSink("/t", writer="native"), "writer is 'native'"),
        (lambda: DeltaSink("/t", writer="portable"), "writer is 'portable'"),
        (lambda: DeltaSink("/t", store_options={"aws_region": "x"}), "takes no options"),
        (lambda: DeltaSink("s3a://bucket/t", store_options={"aws_secret_access_key": "x"}), "is a secret"),
        (lambda: DeltaSink("/t", schema_evolution="NONE"), "schema_evolution is 'NONE'"),
        (lambda: DeltaSink("/t", options={"TxnAppId": "x"}), "TxnAppId"),
        (lambda: DeltaSink("/t", options={"mergeSchema": "true"}), "mergeSchema"),
        (lambda: DeltaSink("/t", options={"dataChange": "false"}), "'dataChange' is not known"),
        (lambda: DeltaSink("/t", options={"delta.appendOnly": "true"}), "'delta.appendOnly' is not known"),
        (lambda: DeltaSink("/t", options={"compresion": "zstd"}), "'compresion' is not known"),
        (lambda: DeltaSink("/t", options={"Compression": "zst"}), "'compression' cannot be 'zst'"),
        (lambda: DeltaSink("/t", options={"compression": ""}), "'compression' cannot be ''"),
        (
            lambda: DeltaSink("/t", options={"maxRecordsPerFile": "1e5"}),
            "'maxRecordsPerFile' cannot be '1e5'",
        ),
        (lambda: DeltaSink("/t", options={"MaxRecordsPerFile": ""}), "'maxRecordsPerFile' cannot be ''"),
        (lambda: DeltaSink("/t", options={"parquet.writer.version": "v3"}), "version' cannot be 'v3'"),
        (lambda: DeltaSink("/t", options={"optimizeWrite": "yes"}), "'optimizeWrite' cannot be 'yes'"),
    ],
)
def test_settings_are_checked_where_they_are_given(make, message):
    with pytest.raises(ConfigError, match=message):
        make()
    assert DeltaSink("/t", writer="python").writer == DeltaSink("/t").writer == "python"
    assert DeltaSink("s3a://bucket/t", store_options={"aws_secret_access_key": "env:KEY"}).store_options


@pytest.mark.parametrize("codec", [*PARQUET_CODECS, "ZSTD"])
def test_files_are_written_as_options_say(codec, tmp_path):
    options = {"compression": codec, "maxRecordsPerFile": "2", "Parquet.Writer.Version": "PARQUET_2_0"}
    found = file_options(DeltaSink("/t", options={**options, "optimizeWrite": "False"}).options)
    assert found == {"compression": codec.lower(), "max_rows": 2, "page_version": "2.0"}
    adds = FilesToWrite(TableFiles(str(tmp_path)), **found).write([pa.record_batch([[1, 2, 3]], ["a"])], 0)
    written = [pq.ParquetFile(tmp_path / add["path"]) for add in adds]
    assert [one.read().column("a").to_pylist() for one in written] == [[1, 2], [3]]
    used = {one.metadata.row_group(0).column(0).compression for one in written}
    assert used == {{"NONE": "UNCOMPRESSED", "LZ4_RAW": "LZ4"}.get(codec.upper(), codec.upper())}
    assert file_options({"maxRecordsPerFile": "-1"})["max_rows"] == 0


def test_the_note_of_a_commit_says_whose_checkpoint_it_holds():
    ours, other = app_id(JOB, "table"), app_id(JOB, "table-2")
    mark = Mark(CheckpointId(7), "0123456789abcdef")
    note = checkpoint_note(ours, mark)
    assert mark_in(note, ours) == mark_in(f"{note} 00c0ffee", ours) == mark
    assert mark_in(note, other) is None
    assert mark_in(f"flinkish-commit {ours} 7 00c0ffee", ours) == Mark(CheckpointId(7))
    assert mark_in("a user's note", ours) is None
