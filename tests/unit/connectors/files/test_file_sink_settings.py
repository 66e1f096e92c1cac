"""What a file sink is told: settings that are refused, names, rolling, buckets and partition times."""

from __future__ import annotations

import gzip
from datetime import datetime
from pathlib import Path

import pytest
from pyspark.sql import types as T

from flinkish_spark import (
    UNLIMITED,
    BucketAssigner,
    ColumnBuckets,
    Compaction,
    DateTimeBuckets,
    ExpressionBuckets,
    FileFormat,
    FileSink,
    FinalPartitionAction,
    MetastorePartition,
    PartitionCommit,
    PartitionPolicy,
    PartitionTime,
    ProcessTime,
    RollingPolicy,
    RollOnCheckpoint,
    SuccessFile,
)
from flinkish_spark.connectors.files.buckets import values_of
from flinkish_spark.connectors.files.committer import CommitSettings, advance
from flinkish_spark.connectors.files.disk import Disk, PartName, SinkFiles
from flinkish_spark.connectors.files.ledger import OpenPartition, State
from flinkish_spark.connectors.files.output_formats import check_columns
from flinkish_spark.connectors.files.rolling import Chunk, LineMerger, roll
from flinkish_spark.connectors.files.sink import local_path
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, JobUuid
from flinkish_spark.protocol.records import Outcome
from tests.support.file_sink_rig import JOB, Rig, completed

FIELDS = T.StructType().add("id", "long").add("name", "string").add("tags", T.ArrayType(T.StringType()))
HOUR_MS = 3_600_000


class Numbered(BucketAssigner):
    """Names a folder by a number."""

    names = (5,)

    def columns(self, now_ms):
        return {}

    def check(self, schema, uid):
        pass


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"path": "relative/path"}, "is relative"),
        ({"path": ""}, "is relative"),
        ({"path": "s3a://bucket/orders"}, "cannot write to 's3a://bucket/orders'.*renames"),
        ({"path": "hdfs://host/x"}, "cannot write"),
        ({"path": "file://host/x"}, "cannot write"),
        ({"format": "parquet"}, "format is 'parquet'"),
        ({"options": {"maxRecordsPerFile": "5"}}, "give the rolling policy a part_bytes"),
        ({"options": {"Path": "/x"}}, "option 'Path' cannot be used"),
        ({"options": {"compression": 5}}, "a text for each"),
        (
            {"options": {"compresion": "zstd"}},
            "a file sink with parquet does not take the option 'compresion'.*compression",
        ),
        ({"options": {"parquet.block.size": "1", "header": "true"}}, "does not take the option 'header'"),
        ({"format": FileFormat.JSON, "options": {"pretty": "true"}}, "does not take the option 'pretty'"),
        (
            {"format": FileFormat.CSV, "options": {"Encoding": "ISO-8859-1"}},
            "would be in ISO-8859-1. A character that this encoding lacks would become a question mark",
        ),
        ({"format": FileFormat.JSON, "options": {"charset": "US-ASCII"}}, "files would be in US-ASCII"),
        ({"format": FileFormat.CSV, "options": {"codec": "zstd"}}, "cannot be written with the codec 'zstd'"),
        *(
            (
                {"format": kind, "options": {name: "x"}},
                f"does not take the option '{name}'.*change the text of values",
            )
            for kind in (FileFormat.JSON, FileFormat.CSV)
            for name in ("dateFormat", "timestampFormat", "timestampNTZFormat", "timeZone", "locale")
        ),
        ({"options": {"dateFormat": "x"}}, "a file sink with parquet does not take the option 'dateFormat'"),
        *(
            (
                {"format": FileFormat.CSV, "options": {name: "true"}},
                f"a file sink with csv does not take the option '{name}'",
            )
            for name in ("escape", "emptyValue", "ignoreLeadingWhiteSpace", "multiLine")
        ),
        ({"format": FileFormat.CSV, "options": {"header": "yes"}}, "'header' is 'yes'"),
        *(
            ({"format": FileFormat.CSV, "options": one}, f"'{[*one][-1]}' is .*must be able to distinguish")
            for one in (
                *({"sep": text} for text in ("", "\\t", '"', "a\n")),
                *({"quote": text} for text in ("", "''", "\\", "\n", "\0", "\x1f", " ", "😀")),
                *({"nullValue": text} for text in ("a,b", '"', "\r")),
                {"lineSep": "|", "sep": "|"},
                *({name: "\ufeff"} for name in ("sep", "quote", "nullValue")),
            )
        ),
        *(
            (
                {"format": FileFormat.CSV, "options": {"lineSep": text}},
                f"lines of csv files would end with '{text}'. .*take one or two characters",
            )
            for text in ("<->", "😀;")
        ),
        ({"format": FileFormat.CSV, "options": {"lineSep": ""}}, "lines of csv files would end with ''"),
        ({"format": FileFormat.TEXT, "options": {"lineSep": ""}}, "lines of text files would end with ''"),
        ({"format": FileFormat.TEXT, "options": {"lineSep": "\ufeff"}}, r"would end with '\\ufeff'"),
        (
            {"format": FileFormat.JSON, "options": {"lineSep": "|"}},
            "would end with '|'. A text may have that in it",
        ),
        ({"options": {"parquet.compression": "lzo"}}, "codec 'lzo', which an option names.*lz4_raw"),
        ({"options": {"parquet.block.size": "0"}}, "'parquet.block.size' cannot be '0'"),
        ({"options": {"parquet.enable.dictionary": "1"}}, "'parquet.enable.dictionary' cannot be '1'"),
        (
            {"options": {"parquet.bloom.filter.enabled": "true"}},
            "does not take the option .parquet.bloom.filter.enabled",
        ),
        ({"bucket_by": "country"}, "must be an instance of BucketAssigner, or a list of BucketAssigner"),
        ({"bucket_by": [ColumnBuckets("a"), ExpressionBuckets("A", "1")]}, "two levels.*'a'"),
        ({"bucket_by": ColumnBuckets("_hidden")}, "cannot be called '_hidden'"),
        ({"bucket_by": [ColumnBuckets("a"), Numbered()]}, "cannot be called 5"),
        ({"rolling": 5}, "give a RollOnCheckpoint or a RollingPolicy"),
        ({"compaction": 5}, "compaction is 5"),
        ({"partition_commit": ProcessTime()}, "partition_commit is"),
        ({"rolling": RollingPolicy(), "compaction": Compaction()}, "both a RollingPolicy and a Compaction"),
        (
            {"format": FileFormat.JSON, "options": {"compression": "lz4"}, "compaction": Compaction()},
            "codec 'lz4' cannot be concatenated",
        ),
        (
            {
                "format": FileFormat.CSV,
                "options": {"header": "true", "compression": "gzip"},
                "rolling": RollingPolicy(),
            },
            "header line of a compressed CSV",
        ),
        (
            {"format": FileFormat.CSV, "options": {"encoding": "UTF-16"}, "compaction": Compaction()},
            "byte order mark",
        ),
        (
            {"format": FileFormat.CSV, "options": {"encoding": "ISO-8859-1"}},
            r"would be in ISO-8859-1.*would become a question mark",
        ),
        ({"format": FileFormat.JSON, "options": {"Charset": "US-ASCII"}}, "would be in US-ASCII"),
    ],
)
def test_settings_that_cannot_be_used_are_refused_where_they_are_made(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        FileSink(**{"path": "/lake/out", **settings})


class Async(PartitionPolicy):
    async def commit(self, partition, spark): ...


@pytest.mark.parametrize(
    "make",
    [
        lambda: RollingPolicy(part_bytes=0),
        lambda: RollingPolicy(rollover_ms=-1),
        lambda: RollOnCheckpoint(part_bytes="1"),
        lambda: Compaction(part_bytes=True),
        lambda: ColumnBuckets(),
        lambda: ColumnBuckets(5),
        lambda: DateTimeBuckets("yyyy-QQ"),
        lambda: DateTimeBuckets("--"),
        lambda: DateTimeBuckets("yyyy/MM"),
        lambda: DateTimeBuckets("yyyy-MM-dd--dd"),
        lambda: DateTimeBuckets(zone="Mars/Olympus"),
        lambda: DateTimeBuckets(name=".dt"),
        lambda: ExpressionBuckets("x", 5),
        lambda: SuccessFile("a/b"),
        lambda: SuccessFile(".."),
        lambda: SuccessFile("a\0b"),
        lambda: ProcessTime(-1),
        lambda: PartitionTime("{dt", delay_ms=0),
        lambda: PartitionTime(zone="nowhere"),
        lambda: PartitionTime(watermark=5),
        lambda: PartitionCommit(trigger=SuccessFile()),
        lambda: PartitionCommit(policies=()),
        lambda: PartitionCommit(policies=(5,)),
        lambda: PartitionCommit(policies=(Async(),)),
        lambda: PartitionCommit(at_final="WAIT"),
    ],
)
def test_values_out_of_range_are_refused(make) -> None:
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize(
    ("kind", "schema", "left_out", "message"),
    [
        (FileFormat.TEXT, "id LONG, name STRING", (), "A text file holds one string column"),
        (FileFormat.TEXT, "id LONG, name STRING", ("ID",), ""),
        (FileFormat.CSV, "id LONG, tags ARRAY<STRING>", (), "A CSV column cannot hold array"),
        (FileFormat.CSV, "id LONG, tags MAP<STRING, LONG>", ("tags",), ""),
        (FileFormat.PARQUET, "id LONG, nothing VOID", (), "has no type"),
        (FileFormat.PARQUET, "id LONG", ("id",), "would have no columns"),
        (FileFormat.JSON, "id LONG, tags ARRAY<STRING>", (), ""),
    ],
)
def test_fields_that_a_format_cannot_hold_are_refused(kind, schema, left_out, message) -> None:
    types = {"LONG": T.LongType(), "STRING": T.StringType(), "VOID": T.NullType()}
    types |= {
        "ARRAY<STRING>": T.ArrayType(T.StringType()),
        "MAP<STRING,LONG>": T.MapType(T.StringType(), T.LongType()),
    }
    pairs = [part.strip().split(" ", 1) for part in schema.replace(", LONG>", ",LONG>").split(", ")]
    fields = T.StructType([T.StructField(name, types[kind_]) for name, kind_ in pairs])
    if not message:
        check_columns(kind, fields, left_out, "out")
        return
    with pytest.raises(SchemaError, match=message):
        check_columns(kind, fields, left_out, "out")


@pytest.mark.parametrize(
    ("assigner", "message"),
    [
        (ColumnBuckets("country"), "that its stream does not have"),
        (ColumnBuckets("tags"), "cannot be part of a folder's name"),
        (DateTimeBuckets(column="name"), "column 'name' of type string, and it must be timestamp"),
        (DateTimeBuckets(column="nothing"), "column 'nothing', which its stream does not have"),
        (DateTimeBuckets(name="ID"), "and so has a field"),
        (ExpressionBuckets("name", "id"), "and so has a field"),
    ],
)
def test_buckets_that_do_not_fit_the_stream_are_refused(assigner: BucketAssigner, message) -> None:
    with pytest.raises(SchemaError, match=message):
        assigner.check(FIELDS, "out")


def test_paths_are_local_and_have_one_spelling() -> None:
    assert local_path("/lake//x/../out/") == Path("/lake/out")
    assert local_path("file:/lake/a%20b") == local_path("file:///lake/a%20b") == Path("/lake/a b")
    assert local_path("/lake/a%20b") == Path("/lake/a%20b")


def test_names_are_found_again_and_not_mixed_up() -> None:
    files = SinkFiles(Path("/lake"), JOB, "out")
    part = PartName(3, 12, 4, ".snappy.parquet")
    assert files.parse_finished(files.make_finished_name(part)) == part
    assert files.parse_finished(files.make_finished_name(PartName(1, 1, 0, ""))) == PartName(1, 1, 0, "")
    others = [SinkFiles(Path("/lake"), JobUuid("b" * 32), "out"), SinkFiles(Path("/lake"), JOB, "out-1-2-3")]
    assert not any(other.parse_finished(files.make_finished_name(part)) for other in others)
    assert not any(files.parse_finished(other.make_finished_name(part)) for other in others)
    assert len({files.hidden, *(other.hidden for other in others)}) == 3
    assert files.parse_finished("part-00000-x.c000.json") is None


def test_a_staged_file_has_the_extension_that_its_task_gave_it() -> None:
    uuid = "894e7d00-1ed4-4ff5-9f09-81bfb758af7c"
    for extension in (".txt", ".json.gz", ""):
        found = Chunk("/lake", "1-1-00000000", f"v=1.5/part-00012-{uuid}-c003{extension}", 1, 1, 1)
        assert found.extension == extension


def chunk(size: int, bucket: str = "", checkpoint: int = 1, at_ms: int | None = None) -> Chunk:
    name = "part-00000-894e7d00-1ed4-4ff5-9f09-81bfb758af7c-c000.json"
    return Chunk("/lake", "1-1-0a0b0c0d", f"{bucket}/{name}" if bucket else name, size, 1, checkpoint, at_ms)


def sizes(parts) -> list[list[int]]:
    return [[one.bytes for one in part] for part in parts]


def test_a_rolling_policy_finishes_full_parts_and_keeps_the_rest_open() -> None:
    """Behaviour 159."""
    policy = RollingPolicy(part_bytes=100, rollover_ms=1_000, inactivity_ms=500)
    chunks = [chunk(60, at_ms=0), chunk(50, at_ms=100), chunk(30, at_ms=100)]
    rolled = roll(chunks, policy, None, 200)
    assert sizes(rolled.parts) == [[60]] and [c.bytes for c in rolled.open] == [50, 30]
    assert sizes(roll([chunk(60), chunk(40)], policy, None, 0).parts) == [[60, 40]]
    # Inactive since 100; the oldest is 1,000 old at 1,000; a partition that is due; the end.
    assert sizes(roll(chunks, policy, None, 600).parts) == [[60], [50, 30]]
    old = [chunk(1, at_ms=0), chunk(1, at_ms=900)]
    assert not roll(old, policy, None, 999).parts and sizes(roll(old, policy, None, 1_000).parts) == [[1, 1]]
    young = [chunk(1, "a=1", at_ms=0), chunk(1, "a=2", at_ms=0)]
    due = roll(young, policy, None, 1, frozenset({("/lake", "a=1")}))
    assert [part[0].bucket for part in due.parts] == ["a=1"] and len(due.open) == 1
    assert len(roll(young, policy, None, 1, rolls_all=True).parts) == 2


def test_without_compaction_every_file_is_a_part() -> None:
    chunks = [chunk(1, "a=1"), chunk(1, "a=1"), chunk(1, "a=2")]
    assert sizes(roll(chunks, RollOnCheckpoint(), None, 0).parts) == [[1], [1], [1]]
    assert sizes(roll(chunks, RollOnCheckpoint(), Compaction(10), 0).parts) == [[1, 1], [1]]
    assert RollOnCheckpoint().part_bytes is UNLIMITED


def test_values_of_folders_are_unescaped() -> None:
    assert values_of("a=x%2Fy%3D/b=__HIVE_DEFAULT_PARTITION__/c=") == {"a": "x/y=", "b": None, "c": ""}


def test_times_of_staging_are_written_in_the_zone_that_was_asked_for() -> None:
    berlin = DateTimeBuckets("yyyyMMdd_HHmmss", zone="Europe/Berlin")
    assert berlin._format(1_772_348_400_000) == "20260301_080000"
    assert berlin.parse("20260301_080000") == 1_772_348_400_000


def utc_ms(text: str) -> int:
    return int(datetime.fromisoformat(f"{text}+00:00").timestamp() * 1000)


@pytest.mark.parametrize(
    ("zone", "pattern", "value", "delay_hours", "over"),
    [
        # 02:00 to 03:00 comes at 00:00Z and again at 01:00Z; the hours around it come once.
        ("Europe/Berlin", "yyyy-MM-dd--HH", "2026-10-25--02", 1, "2026-10-25T02:00"),
        ("Europe/Berlin", "yyyy-MM-dd--HH", "2026-10-25--01", 1, "2026-10-25T00:00"),
        ("Europe/Berlin", "yyyy-MM-dd--HH", "2026-10-25--03", 1, "2026-10-25T03:00"),
        # Two hours of delay: one is left for what is late.
        ("Europe/Berlin", "yyyy-MM-dd--HH", "2026-10-25--02", 2, "2026-10-25T03:00"),
        ("Europe/Berlin", "yyyyMMddHHmm", "202610250259", 1, "2026-10-25T02:00"),
        ("Europe/Berlin", "yyyyMMddHHmmss", "20261025020000", 0, "2026-10-25T01:00"),
        # A day of 25 hours, one of 23, and the months with them.
        ("Europe/Berlin", "yyyy-MM-dd", "2026-10-25", 24, "2026-10-25T23:00"),
        ("Europe/Berlin", "yyyy-MM-dd", "2026-03-29", 24, "2026-03-29T22:00"),
        ("Europe/Berlin", "yyyy-MM", "2026-10", 31 * 24, "2026-10-31T23:00"),
        ("Europe/Berlin", "yyyy-MM", "2026-03", 31 * 24, "2026-03-31T22:00"),
        # An hour that no clock shows: only columns without a zone have it.
        ("Europe/Berlin", "yyyy-MM-dd--HH", "2026-03-29--02", 1, "2026-03-29T02:00"),
        ("Europe/Berlin", "yyyy-MM-dd--HH", "2026-03-29--03", 1, "2026-03-29T02:00"),
        # Half an hour is put back at 02:00 (+11) to 01:30 (+10:30): 01:30 to 02:00 comes twice.
        ("Australia/Lord_Howe", "yyyy-MM-dd--HH", "2026-04-05--01", 1, "2026-04-04T15:30"),
        ("Australia/Lord_Howe", "yyyy-MM-dd HH-mm", "2026-04-05 01-29", 1, "2026-04-04T14:30"),
        ("Australia/Lord_Howe", "yyyy-MM-dd HH-mm", "2026-04-05 01-30", 1, "2026-04-04T15:01"),
        # 2011-12-30 was left out: behind the 29th (-10) came the 31st (+14).
        ("Pacific/Apia", "yyyy-MM-dd", "2011-12-29", 24, "2011-12-30T10:00"),
        ("Pacific/Apia", "yyyy-MM-dd", "2011-12-31", 24, "2011-12-31T10:00"),
        # A quarter of an hour beside the others.
        ("Asia/Kathmandu", "yyyy-MM-dd--HH", "2026-10-25--02", 1, "2026-10-24T21:15"),
        ("UTC", "yyyy", "2026", 365 * 24, "2027-01-01T00:00"),
    ],
)
def test_a_partition_is_over_when_no_clock_shows_its_time_any_more(
    zone, pattern, value, delay_hours, over
) -> None:
    """The instants are counted by hand from the zones' offsets."""
    hours, trigger = DateTimeBuckets(pattern, zone=zone), PartitionTime(delay_ms=delay_hours * HOUR_MS)
    expected = utc_ms(over) + (59 * 60_000 if pattern.endswith("mm") else 0)
    assert trigger.due_ms(f"dt={value}", (hours,)) == expected


@pytest.mark.parametrize(
    ("bucket", "delay_hours", "over"),
    [
        ("d=2026-10-25/h=02", 1, "2026-10-25T02:00"),
        ("d=2026-10-25/h=01", 1, "2026-10-25T00:00"),
        ("d=2026-10-25/h=02", 0, "2026-10-25T01:00"),
        ("d=2026-10-24/h=02", 0, "2026-10-24T00:00"),
        ("d=2026-10-25/h=00", 24, "2026-10-25T23:00"),
        ("d=2026-03-29/h=03", 1, "2026-03-29T02:00"),
    ],
)
def test_the_same_of_a_time_that_is_put_together(bucket, delay_hours, over) -> None:
    trigger = PartitionTime("{d} {h}:00", delay_ms=delay_hours * HOUR_MS, zone="Europe/Berlin")
    assert trigger.due_ms(bucket, ()) == utc_ms(over)
    if delay_hours == 1:
        # Folders in folders say it together.
        both = [
            DateTimeBuckets(p, name=n, zone="Europe/Berlin") for p, n in (("yyyy-MM-dd", "d"), ("HH", "h"))
        ]
        assert PartitionTime(delay_ms=HOUR_MS).due_ms(bucket, both) == utc_ms(over)


def test_an_hour_that_comes_twice_is_committed_behind_the_second_one() -> None:
    """2026-10-25--02 in Berlin begins at 00:00Z (1,792,886,400 s) and is over at 02:00Z."""
    setting, berlin = PartitionCommit(PartitionTime(delay_ms=HOUR_MS)), DateTimeBuckets(zone="Europe/Berlin")
    state, due = State(), []
    for number, hour in enumerate(("02", "03", "04"), 1):
        chunks = [chunk(1, f"dt=2026-10-25--{hour}")]
        found = advance(state, chunks, completed(number), setting, (berlin,))
        waiting = tuple(p for p in found.waiting if p not in found.due)
        state = State(number, (), waiting, found.seen_ms)
        due.append(([p.bucket for p in found.due], found.seen_ms))
    assert due == [
        ([], 1_792_886_400_000),
        (["dt=2026-10-25--02"], 1_792_893_600_000),
        (["dt=2026-10-25--03"], 1_792_897_200_000),
    ]


def progress(setting, state, chunks, checkpoint, purpose=CheckpointPurpose.PERIODIC):
    found = advance(state, chunks, completed(checkpoint, purpose=purpose), setting, (DateTimeBuckets(),))
    due = [p.bucket for p in found.due]
    waiting = tuple(p for p in found.waiting if p not in found.due)
    return due, State(checkpoint, (), waiting, found.seen_ms)


def test_partitions_by_process_time_wait_from_their_first_data_on() -> None:
    setting = PartitionCommit(ProcessTime(2_000))
    due, state = progress(setting, State(), [chunk(1, "dt=a")], 1)
    due_2, state = progress(setting, state, [chunk(1, "dt=a"), chunk(1, "dt=b")], 2)
    assert (due, due_2) == ([], [])
    due, state = progress(setting, state, [], 3)
    assert due == ["dt=a"] and [p.bucket for p in state.partitions] == ["dt=b"]
    # Late data: it waits again.
    due, state = progress(setting, state, [chunk(1, "dt=a")], 4)
    assert due == ["dt=b"] and state.partitions == (OpenPartition("/lake", "dt=a", 4_000),)


def test_partitions_by_partition_time_follow_the_greatest_time_in_the_data() -> None:
    setting = PartitionCommit(PartitionTime(delay_ms=HOUR_MS))
    due, state = progress(setting, State(), [chunk(1, "dt=2026-03-01--07")], 1)
    assert due == [] and state.seen_ms == 1_772_348_400_000
    due, state = progress(setting, state, [chunk(1, "dt=2026-03-01--08"), chunk(1, "dt=none")], 2)
    assert due == ["dt=2026-03-01--07"]
    # Late data is due at once; what is no time waits for the end.
    due, state = progress(setting, state, [chunk(1, "dt=2026-03-01--06")], 3)
    assert due == ["dt=2026-03-01--06"]
    due, _ = progress(setting, state, [], 4, CheckpointPurpose.FINAL)
    assert due == []
    at_end = PartitionCommit(setting.trigger, at_final=FinalPartitionAction.COMMIT)
    due, _ = progress(at_end, state, [], 4, CheckpointPurpose.FINAL)
    assert due == ["dt=2026-03-01--08", "dt=none"]


def test_a_watermark_of_the_user_s_takes_the_place_of_the_data_s() -> None:
    watermarks = {1: None, 2: 1_772_348_400_000}
    trigger = PartitionTime("{dt} {hour}:00", watermark=lambda c: watermarks[int(c.checkpoint)])
    setting = PartitionCommit(trigger)
    due, state = progress(setting, State(), [chunk(1, "dt=2026-03-01/hour=07")], 1)
    assert due == []
    due, state = progress(setting, state, [chunk(1, "dt=2026-03-01/hour=08")], 2)
    assert due == ["dt=2026-03-01/hour=07"]


@pytest.mark.parametrize(
    "watermark", [lambda completed: "2026", lambda completed: 1 / 0, lambda completed: True]
)
def test_a_watermark_that_fails_is_asked_again(tmp_path, watermark) -> None:
    """Not an unknown error in the middle of a completion: data is visible by then."""
    trigger = PartitionTime("{dt} 00:00", watermark=watermark)
    settings = CommitSettings(partition_commit=PartitionCommit(trigger), assigners=(ColumnBuckets("dt"),))
    rig = Rig(tmp_path, settings)
    rig.committer().commit(CheckpointId(1), [rig.stage({"dt=2026-03-01": ["a"]})])
    answer = rig.committer().checkpoint_complete(completed(1))
    assert answer.outcome is Outcome.RETRY and "watermark of PartitionTime" in answer.detail
    assert rig.lines() == ["a"]


def test_a_watermark_that_cannot_be_asked_is_refused_where_it_is_said() -> None:
    with pytest.raises(ConfigError, match="can be called with one argument"):
        PartitionTime("{dt} 00:00", watermark=lambda: 5)


def test_partition_times_that_name_no_folder_are_refused() -> None:
    by_country = (ColumnBuckets("country"),)
    for pattern in ("{country.x} 00:00", "{country[0]} 00:00"):
        with pytest.raises(ConfigError, match="cannot read the time of a partition"):
            PartitionTime(pattern).check(by_country, "out")
    for trigger in (PartitionTime("{dt} 00:00"), PartitionTime("2026-01-01"), PartitionTime()):
        with pytest.raises(ConfigError, match="cannot read the time of a partition"):
            trigger.check(by_country, "out")
    PartitionTime().check((DateTimeBuckets(),), "out")
    with pytest.raises(ConfigError, match="The patterns of DateTimeBuckets have no year"):
        PartitionTime().check((DateTimeBuckets("MM-dd"),), "out")


def test_partitions_wait_for_a_start_that_commits_them() -> None:
    state = State(1, (), (OpenPartition("/lake", "dt=a", 5),), 7)
    found = advance(state, [chunk(1, "dt=b")], completed(2), None, ())
    assert (found.waiting, found.due, found.seen_ms) == (state.partitions, (), 7)


def test_lines_are_merged_with_one_header(tmp_path) -> None:
    sources = []
    for number in range(3):
        path = tmp_path / f"{number}.csv"
        path.write_text(f'id,"a,b"\n{number},x\n')
        sources.append(path)
    merger = LineMerger(Disk(), FileFormat.CSV, {"Header": "true"})
    for _ in range(2):
        merger.merge({tmp_path / "out.csv": sources}, tmp_path / "scratch")
    assert (tmp_path / "out.csv").read_text() == 'id,"a,b"\n0,x\n1,x\n2,x\n'


def test_compressed_lines_are_read_as_one_file(tmp_path) -> None:
    sources = [tmp_path / f"{number}.json.gz" for number in range(2)]
    for source in sources:
        source.write_bytes(gzip.compress(f'{{"n": "{source.name}"}}\n'.encode()))
    merger = LineMerger(Disk(), FileFormat.JSON, {"compression": "gzip"})
    merger.merge({tmp_path / "out.json.gz": sources}, tmp_path / "scratch")
    assert gzip.decompress((tmp_path / "out.json.gz").read_bytes()).count(b"\n") == 2


def test_names_and_values_in_sql_are_quoted() -> None:
    from flinkish_spark.connectors.files.partitions import _literal

    assert MetastorePartition("db.odd`name").quoted == "`db`.`odd``name`"
    assert _literal("it's \\ here") == "'it\\'s \\\\ here'" and _literal(None) == "NULL"


def test_a_time_of_day_is_no_bucket() -> None:
    """Spark accepts the partition when a job starts, and fails at each micro-batch."""
    fields = T.StructType([T.StructField("at", T.TimeType(6))])
    with pytest.raises(
        SchemaError, match=r"A time\(6\) cannot be part of a folder's name.*cast it to a string"
    ):
        ColumnBuckets("at").check(fields, "out")
    for kind in (T.TimestampType(), T.TimestampNTZType(), T.DateType()):
        ColumnBuckets("at").check(T.StructType([T.StructField("at", kind)]), "out")
