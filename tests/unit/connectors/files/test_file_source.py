"""Files of a folder: each once and whole, in an order that stays."""

from __future__ import annotations

import bz2
import csv
import datetime
import errno
import gzip
import itertools
import math
import os
import time

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flinkish_spark.checkpoint.failures import RepeatableUserError, classify
from flinkish_spark.connectors.files import input_formats as csv_quotes
from flinkish_spark.connectors.files.input_formats import BadLine
from flinkish_spark.connectors.files.source import Folders, naming
from flinkish_spark.connectors.split_positions import SplitPosition
from flinkish_spark.connectors.splits import SourceUnavailable, SplitStreamReader
from flinkish_spark.core.errors import ConfigError, InputLostError, SchemaError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.sources import (
    CsvFiles,
    CsvHeader,
    Discovery,
    FileSource,
    HybridSource,
    JsonLines,
    ParquetFiles,
    RateLimit,
    TextLines,
)
from tests.unit.connectors.test_split_source import Counters, rows_of, step

SCHEMA = "n LONG, name STRING"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


def put(folder, name, text, at=0):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    os.utime(path, (1_000_000 + at, 1_000_000 + at))
    return path


def reader_of(source, tmp_path):
    source = source.bind("in")
    job_dir = JobDir(LocalStore(tmp_path / "job"))
    source.preflight(None, job_dir, "in")
    source.check_input(job_dir, "in", None)
    return SplitStreamReader(source, str(tmp_path / "job" / "control"))


def texts(folder, **settings) -> FileSource:
    return FileSource(str(folder), TextLines(), "value STRING", discover_every_ms=1, **settings)


def first_column(rows):
    return [row[0] for row in rows]


def test_what_is_there_at_the_first_start_is_read_oldest_first_and_then_it_ends(folder, tmp_path) -> None:
    put(folder, "b.txt", "3\n4\n", at=5)
    put(folder, "a.txt", "5", at=9)
    put(folder, "deep/er/c.txt", "1\r\n2\n", at=1)
    for hidden in ("_SUCCESS", ".x.txt.crc", "_temporary/d.txt", "empty.csv"):
        put(folder, hidden, "no\n")
    reader = reader_of(texts(folder, pattern="*.txt"), tmp_path)
    start = reader.initialOffset()
    end, rows = step(reader, start)
    assert first_column(rows) == ["1", "2", "3", "4", "5"] and SplitPosition.from_json(end).is_ended
    put(folder, "late.txt", "6\n")
    again = reader_of(texts(folder, pattern="*.txt"), tmp_path)
    assert rows_of(again, start, end) == rows and step(again, start) == (end, rows)


def test_files_that_come_later_follow_even_if_they_are_older(folder, tmp_path) -> None:
    put(folder, "a", "1\n", at=50)
    source = texts(folder, discovery=Discovery.CONTINUOUS)
    reader = reader_of(source, tmp_path)
    position, rows = step(reader, reader.initialOffset())
    put(folder, "older", "2\n", at=1)
    # Another process goes on, and a second one at the same time.
    one, two = reader_of(source, tmp_path), reader_of(source, tmp_path)
    put(folder, "z", "3\n", at=2)
    for other in (one, two, reader):
        end, more = step(other, position)
        assert first_column(rows + more) == ["1", "2", "3"]
    assert not SplitPosition.from_json(end).is_ended and not source.is_bounded


def test_parts_take_turns_and_a_micro_batch_has_so_many_files(folder, tmp_path) -> None:
    for n in range(7):
        put(folder, f"{n}", f"{n}\n", at=n)
    reader = reader_of(texts(folder, splits=2, max_files_per_batch=2), tmp_path)
    position, found = reader.initialOffset(), []
    while not SplitPosition.from_json(position).is_ended:
        position, rows = step(reader, position)
        found.append([(row[0], row[1]) for row in rows])
    assert found == [
        [("0", 0), ("2", 0), ("1", 1), ("3", 1)],
        [("4", 0), ("6", 0), ("5", 1)],
    ]


@pytest.mark.parametrize("change", ["content", "time", "gone"])
def test_a_file_that_has_changed_is_lost_input(folder, tmp_path, change) -> None:
    path = put(folder, "a", "1\n")
    reader = reader_of(texts(folder), tmp_path)
    start = reader.initialOffset()
    end = reader.latestOffset(start, None)
    if change == "gone":
        path.unlink()
    else:
        put(folder, "a", "1\n2\n" if change == "content" else "1\n", at=7)
    with pytest.raises(InputLostError, match=r"is gone|has changed"):
        rows_of(reader, start, end)


def test_a_savepoint_takes_the_list_along(folder, tmp_path) -> None:
    put(folder, "a", "1\n", at=1)
    source = texts(folder, discovery=Discovery.CONTINUOUS)
    reader = reader_of(source, tmp_path)
    position, _ = step(reader, reader.initialOffset())
    saved = reader.source.identity(JobDir(LocalStore(tmp_path / "job")), "in")
    put(folder, "0", "2\n", at=0)
    restored = JobDir(LocalStore(tmp_path / "other" / "job"))
    for fact, value in saved.items():
        restored.record_fact(fact, value)
    again = reader_of(source, tmp_path / "other")
    assert first_column(step(again, position)[1]) == ["2"]


def test_a_limit_counts_records_where_it_can(folder, tmp_path) -> None:
    for n in range(4):
        pq.write_table(pa.table({"n": [n] * 10, "name": ["x"] * 10}), folder / f"{n}.parquet")
    source = FileSource(str(folder), ParquetFiles(), SCHEMA).limit_rate(RateLimit(records_per_batch=15))
    reader = reader_of(source, tmp_path)
    _, rows = step(reader, reader.initialOffset())
    assert len(rows) == 20
    slow = source.limit_rate(RateLimit(records_per_second=1_000))
    reader = reader_of(slow, tmp_path)
    assert reader.source.records_between("0", 0, 4) == 40
    source = texts(folder).limit_rate(RateLimit(records_per_batch=100))
    reader = reader_of(source, tmp_path / "texts")
    assert SplitPosition.from_json(reader.latestOffset(reader.initialOffset(), None)).offsets == {"0": 1}


WANTED = [(1, "a"), (2, None), (3, "c,d")]


def files_of(kind, folder):
    if kind == "parquet":
        table = pa.table({"extra": [0] * 3, "name": ["a", None, "c,d"], "n": pa.array([1, 2, 3], pa.int32())})
        pq.write_table(table, folder / "x.parquet")
        return ParquetFiles()
    if kind == "json":
        put(folder, "x.json", '{"n": 1, "name": "a", "more": {}}\n{"n": 2}\n{"name": "c,d", "n": 3}')
        put(folder, "empty.json", "\n")
        return JsonLines()
    if kind == "csv":
        put(folder, "x.csv", 'name,extra,n\na,,1\n,,2\n"c,d",,3\n')
        put(folder, "empty.csv", "")
        return CsvFiles()
    if kind == "csv without names":
        put(folder, "x.csv.gz", gzip.compress(b"1;a\n2;\n3;c,d\n"))
        return CsvFiles(CsvHeader.NONE, delimiter=";")
    raise AssertionError(kind)


@pytest.mark.parametrize("kind", ["parquet", "json", "csv", "csv without names"])
def test_records_of_every_format(folder, tmp_path, kind) -> None:
    source = FileSource(str(folder), files_of(kind, folder), SCHEMA)
    reader = reader_of(source, tmp_path)
    _, rows = step(reader, reader.initialOffset())
    assert [(n, name or None) for n, name, *_ in rows] == WANTED
    assert [row[2:] for row in rows] == [(0, 0), (0, 1), (0, 2)]


def csv_rows(folder, tmp_path, data, schema, form=None):
    put(folder, "x.csv", data)
    reader = reader_of(FileSource(str(folder), form or CsvFiles(), schema), tmp_path)
    return [row[:-2] for row in step(reader, reader.initialOffset())[1]]


def test_only_an_empty_value_of_csv_is_null(folder, tmp_path) -> None:
    data = 'a,b,c\n1,2.5,NA\n,,\n3,NaN,null\n4,-inf,""\n'
    one, two, three, four = csv_rows(folder, tmp_path, data, "a LONG, b DOUBLE, c STRING")
    assert (one, two, four) == ((1, 2.5, "NA"), (None, None, ""), (4, float("-inf"), ""))
    assert three[0] == 3 and math.isnan(three[1]) and three[2] == "null"
    ((small,),) = csv_rows(folder, tmp_path / "2", "b\nnan\n", "b FLOAT")
    assert math.isnan(small)


@pytest.mark.parametrize("value", ["NA", "n/a", "null", "NaN", "#N/A", "-1.#IND"])
def test_words_for_nothing_are_no_numbers_of_csv(folder, tmp_path, value) -> None:
    with pytest.raises(RuntimeError, match=f"the file .* cannot be read.*{value}"):
        csv_rows(folder, tmp_path, f"a,b\n{value},1\n", "a LONG, b DOUBLE")


@pytest.mark.parametrize("data", ["n,name", "n,name\n", "n,name\r\n", '"n","name"', b"\xef\xbb\xbfn,name"])
def test_names_of_columns_alone_are_a_file_without_records(folder, tmp_path, data) -> None:
    assert csv_rows(folder, tmp_path, data, SCHEMA) == []
    with pytest.raises(RuntimeError, match=r"cannot be read.*other"):
        csv_rows(folder, tmp_path / "2", data, "other LONG")


def test_a_row_of_csv_without_an_end_is_one(folder, tmp_path) -> None:
    assert csv_rows(folder, tmp_path, "1,a", SCHEMA, CsvFiles(CsvHeader.NONE)) == [(1, "a")]


#: Text of a CSV file, the line that is refused, and what of it is said.
TORN = [
    ('a,b\nu,1\nx,"1\ny,2\nz,3\n', 3, "a quote that nothing closes"),
    ('a,b\n"', 2, "a quote that nothing closes"),
    ('a,b\n1,"""', 2, "a quote that nothing closes"),
    ('"a,b\n1,2\n', 1, "a quote that nothing closes"),
    # A quote within a value hides nothing, and an end of a line may be two bytes.
    ('a,b\r\nu"v",1\r\nx,"1\r\n', 3, "a quote that nothing closes"),
    ('a,b\n"1"2,3\n', 2, "text after its closing"),
    ('a,b\n"x"y,3\n', 2, "text after its closing"),
    ('a,b\n"x" ,3\n', 2, "text after its closing"),
    ('a,b\n"x"y"z",3\n', 2, "text after its closing"),
    ('a,b\n""x,3\n', 2, "text after its closing"),
    ('\ufeff"a"x,b\n1,3\n', 1, "text after its closing"),
    # The value begins in line 3, and the quote that is meant to open another one closes it.
    ('a,b\né,1\nx,"1\ny,"2"\n', 3, "text after its closing quote, in line 4"),
    ("a,b,a\n1,2,3\n", 1, "has the name 'a' 2 times"),
    ('\n\n"a",b,a\n1,2,3\n', 3, "has the name 'a' 2 times"),
]


@pytest.mark.parametrize(("text", "line", "why"), TORN)
@pytest.mark.parametrize("part_bytes", [3, 7, 1 << 20])
def test_a_torn_quote_of_csv_is_refused_with_its_line(
    folder, tmp_path, monkeypatch, text, line, why, part_bytes
) -> None:
    monkeypatch.setattr(csv_quotes, "_PART_BYTES", part_bytes)
    with pytest.raises(RuntimeError, match=rf"the file {folder}/x.csv cannot be read.*: line {line} .*{why}"):
        csv_rows(folder, tmp_path, text, "a STRING")
    put(folder, "x.csv.gz", gzip.compress(text.encode()))
    with pytest.raises(BadLine, match=rf"line {line} .*{why}"):
        list(CsvFiles().batches(str(folder / "x.csv.gz"), pa.schema([("a", pa.string())])))


@pytest.mark.parametrize("part_bytes", [3, 4, 5, 7, 1 << 20])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_quotes_of_csv_over_borders_of_parts(folder, tmp_path, monkeypatch, part_bytes, end, mark) -> None:
    monkeypatch.setattr(csv_quotes, "_PART_BYTES", part_bytes)
    lines = ['"a";b', '"é;\r\n""x""";a"b', '"";""""', '"""";"\n"', ';"b"']
    wanted = [('é;\r\n"x"', 'a"b'), ("", '"'), ('"', "\n"), ("", "b")]
    data = mark + end.join(lines)
    assert csv_rows(folder, tmp_path, data, "a STRING, b STRING", CsvFiles(delimiter=";")) == wanted
    # Lines are counted with those within values: 1 for the names, 2 for the first record, which has 2.
    ends = end.count("\n") or 1
    starts = [1, 1 + ends, 2 + 2 * ends, 2 + 3 * ends, 3 + 4 * ends]
    path = str(folder / "x.csv")
    assert [csv_quotes.line_of(path, ";", record) for record in range(5)] == starts


def test_an_open_quote_in_a_large_csv_is_refused_and_a_bad_number_has_its_line(folder, tmp_path) -> None:
    rows = "".join(f'"{n}","some ""text"""\n' for n in range(200_000))
    with pytest.raises(RuntimeError, match=r"line 200002 begins a record with a quote that nothing closes"):
        csv_rows(folder, tmp_path, f'n,name\n{rows}1,"x\n2,y\n' + "3,z\n" * 200_000, SCHEMA)
    # Two that are stray are a value, as CSV has it.
    assert csv_rows(folder, tmp_path / "2", 'n,name\n1,"x\n2,y\n3,z"\n', SCHEMA) == [(1, "x\n2,y\n3,z")]
    with pytest.raises(RuntimeError, match=r"line 200002 cannot be read: the field 'n' has 0x80"):
        csv_rows(folder, tmp_path / "3", f"n,name\n{rows}0x80,x\n", SCHEMA)


def test_what_is_seen_fast_of_quotes_is_what_python_s_module_says(tmp_path) -> None:
    """Where pairs are seen, nothing is wrong; all texts of few letters, and parts of any size."""
    path, seen = tmp_path / "x.csv", 0
    for letters in itertools.product('a",\n', repeat=6):
        text = "".join(letters)
        path.write_text(text)
        if csv_quotes._are_in_pairs(str(path), ","):
            seen += 1
            list(csv.reader(text.splitlines(keepends=True), strict=True))
    assert seen > 500


def test_names_of_csv_that_no_field_has_may_come_twice(folder, tmp_path) -> None:
    assert csv_rows(folder, tmp_path, "a,x,x,,\n1,2,3,,\n", "a LONG") == [(1,)]


@pytest.mark.parametrize("size", [3_000_000, 20_000_000])
def test_a_long_row_of_csv_is_read_once_and_in_its_place(folder, tmp_path, size) -> None:
    short = "".join(f"{n},a\n" for n in range(300_000))
    data = f"n,name\n{short}-1,{'x' * size}\n{short}"
    (folder / "x.csv").write_text(data)
    schema = pa.schema([("n", pa.int64()), ("name", pa.string())])
    table = pa.Table.from_batches(CsvFiles().batches(str(folder / "x.csv"), schema))
    assert table["n"].to_pylist() == [*range(300_000), -1, *range(300_000)]
    assert len(table["name"][300_000].as_py()) == size


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (JsonLines(), '{"n": "x"}'),
        (JsonLines(), '{"n": 1'),
        (CsvFiles(), "n,name\nx,y\n"),
        (CsvFiles(), "m,name\n1,y\n"),
        (ParquetFiles(), None),
        (ParquetFiles(), "no Parquet"),
    ],
)
def test_a_file_that_cannot_be_read_says_so(folder, tmp_path, form, text) -> None:
    if text is None:
        pq.write_table(pa.table({"n": [1]}), folder / "x")
    else:
        put(folder, "x", text)
    reader = reader_of(FileSource(str(folder), form, SCHEMA), tmp_path)
    with pytest.raises(RuntimeError, match=rf"\(\) of source 'in'.*the file {folder}/x cannot be read"):
        step(reader, reader.initialOffset())


def cut_gzip():
    """Half of a file that holds no line twice, so that the half has lines, too."""
    whole = gzip.compress("\n".join(f'{{"n": {n * 7919 % 10_007}}}' for n in range(9_000)).encode())
    return whole[: len(whole) // 2]


@pytest.mark.parametrize(
    ("name", "content", "form", "said"),
    [
        ("x.gz", cut_gzip(), JsonLines(), "Truncated compressed stream"),
        ("x.gz", cut_gzip(), TextLines(), "Truncated compressed stream"),
        ("x.bz2", bz2.compress(b"1\n" * 9_000)[:-9], TextLines(), "Truncated compressed stream"),
        ("x.gz", b"no gzip at all", TextLines(), "zlib inflate failed"),
    ],
)
def test_a_file_that_is_cut_off_ends_the_job_and_is_named(
    folder, tmp_path, name, content, form, said
) -> None:
    """It was taken for an outage, which is waited for without an end."""
    put(folder, name, content)
    schema = "value STRING" if isinstance(form, TextLines) else "n LONG"
    reader = reader_of(FileSource(str(folder), form, schema), tmp_path)
    with pytest.raises(RuntimeError, match=rf"the file {folder}/{name} cannot be read: {said}") as caught:
        step(reader, reader.initialOffset())
    error = classify(caught.value)
    assert isinstance(error, RepeatableUserError) and "It is cut off or damaged: restore it" in str(error)


def damaged_parquet(path) -> None:
    """The footer is whole, so the file is found; its one page, behind the header, is not."""
    pq.write_table(pa.table({"n": [*range(9_000)]}), path, use_dictionary=False, compression="snappy")
    content = bytearray(path.read_bytes())
    content[200:4_000] = b"\xff" * 3_800
    path.write_bytes(content)


def test_a_page_of_parquet_that_is_damaged_ends_the_job_and_its_file_is_named(folder, tmp_path) -> None:
    damaged_parquet(folder / "x.parquet")
    reader = reader_of(FileSource(str(folder), ParquetFiles(), "n LONG"), tmp_path)
    with pytest.raises(
        RuntimeError, match=rf"the file {folder}/x.parquet cannot be read: .*snappy"
    ) as caught:
        step(reader, reader.initialOffset())
    assert isinstance(classify(caught.value), RepeatableUserError)


@pytest.mark.parametrize(
    ("raised", "kind", "message"),
    [
        (OSError(errno.EIO, "Input/output error"), OSError, "[Errno 5] Input/output error: '/in/a'"),
        (OSError(errno.ESTALE, "gone", "/in/b"), OSError, "[Errno 116] gone: '/in/b'"),
        (PermissionError(errno.EACCES, "no"), PermissionError, "[Errno 13] no: '/in/a'"),
        (TimeoutError("asleep"), TimeoutError, "asleep"),
        (EOFError("ended"), ValueError, "the file /in/a cannot be read as the schema says: ended"),
        (InputLostError("the file is gone"), InputLostError, "the file is gone."),
    ],
)
def test_what_cannot_be_read_now_is_named_and_stays_what_it_is(raised, kind, message) -> None:
    with pytest.raises(kind) as caught, naming("/in/a"):
        raise raised
    assert type(caught.value) is kind and str(caught.value) == message


@pytest.mark.parametrize("change", ["appended", "replaced", "touched"])
def test_a_file_that_changes_behind_its_reading_is_lost_input(folder, tmp_path, change) -> None:
    """What was added was never read, without a word."""
    put(folder, "deep/a.txt", "1\n")
    source = texts(folder, discovery=Discovery.CONTINUOUS)
    reader = reader_of(source, tmp_path)
    position, rows = step(reader, reader.initialOffset())
    assert first_column(rows) == ["1"]
    if change == "appended":
        put(folder, "deep/a.txt", "1\n2\n")
    elif change == "replaced":
        os.replace(put(folder, "deep/_b", "3\n", at=1), folder / "deep/a.txt")
    else:
        put(folder, "deep/a.txt", "1\n", at=1)
    # The same process, and one that has the list out of the job directory.
    for other in (reader, reader_of(source, tmp_path)):
        time.sleep(0.002)
        with pytest.raises(InputLostError, match=rf"the file {folder}/deep/a.txt has changed") as caught:
            other.latestOffset(position, None)
        assert "delete it if it has been read" in str(caught.value)
    put(folder, "deep/a.txt", "1\n")
    put(folder, "b.txt", "4\n")
    assert first_column(step(reader_of(source, tmp_path), position)[1]) == ["4"]


def test_a_file_may_be_deleted_behind_its_reading(folder, tmp_path) -> None:
    path = put(folder, "a", "1\n")
    source = texts(folder, discovery=Discovery.CONTINUOUS)
    reader = reader_of(source, tmp_path)
    position, _ = step(reader, reader.initialOffset())
    path.unlink()
    put(folder, "b", "2\n")
    time.sleep(0.002)
    assert first_column(step(reader, position)[1]) == ["2"]


def test_a_line_that_is_no_utf8_is_refused_with_its_number(folder, tmp_path) -> None:
    """It was read with other letters: a\\ufffdb."""
    put(folder, "x", b"a\n" * 10_000 + b"a\xffb\r\nc")
    reader = reader_of(texts(folder), tmp_path)
    with pytest.raises(RuntimeError, match=rf"the file {folder}/x .*: line 10001 is no UTF-8: invalid start"):
        step(reader, reader.initialOffset())


def test_a_column_of_another_type_is_told_with_its_file(folder, tmp_path) -> None:
    pq.write_table(pa.table({"at": [1_767_225_600_000]}), folder / "x")
    reader = reader_of(FileSource(str(folder), ParquetFiles(), "at TIMESTAMP"), tmp_path)
    with pytest.raises(
        RuntimeError, match=rf"the file {folder}/x .*: the column 'at' is int64, but the declared type is"
    ):
        step(reader, reader.initialOffset())


def test_history_in_files_and_then_what_is_live(folder, tmp_path) -> None:
    for n in range(3):
        put(folder, f"{n}.json", f'{{"n": {n - 3}}}\n', at=n)
    history = FileSource(str(folder), JsonLines(), "n LONG", max_files_per_batch=1)
    reader = reader_of(HybridSource(history, Counters({"a": 2})), tmp_path)
    position, found = reader.initialOffset(), []
    for _ in range(5):
        position, rows = step(reader, position)
        found.append(first_column(rows))
    assert found == [[-3], [-2], [-1], [0, 1], []]


@pytest.mark.parametrize(
    "make",
    [
        lambda f: FileSource("relative", TextLines(), "value STRING"),
        lambda f: FileSource(f, "text", "value STRING"),
        lambda f: FileSource(f, TextLines, "value STRING"),
        lambda f: FileSource(f, TextLines(), "value LONG"),
        lambda f: FileSource(f, TextLines(), "a STRING, b STRING"),
        lambda f: FileSource(f, CsvFiles(), "a ARRAY<LONG>"),
        lambda f: FileSource(f, JsonLines(), "a MAP<STRING, LONG>"),
        lambda f: FileSource(f, TextLines(), "value NUMBER"),
        lambda f: FileSource(f, TextLines(), "value STRING", splits=0),
        lambda f: FileSource(f, TextLines(), "value STRING", discovery="ONCE"),
        lambda f: FileSource(f, TextLines(), "value STRING", pattern="a/b"),
        lambda f: FileSource(f, TextLines(), "value STRING", max_files_per_batch=0),
        lambda f: CsvFiles(delimiter=""),
        lambda f: CsvFiles(delimiter=";;"),
        lambda f: CsvFiles(delimiter="\n"),
        lambda f: CsvFiles(delimiter="\r"),
        lambda f: CsvFiles(delimiter='"'),
        lambda f: CsvFiles(delimiter="§"),
        lambda f: CsvFiles(delimiter=None),
        lambda f: CsvFiles("NAMES"),
    ],
)
def test_what_cannot_be_is_refused(make, tmp_path) -> None:
    with pytest.raises((ConfigError, SchemaError)):
        make(str(tmp_path))


def test_a_folder_that_is_not_there_is_refused(tmp_path) -> None:
    with pytest.raises(ConfigError, match="is not there"):
        reader_of(texts(tmp_path / "nothing"), tmp_path)


def test_a_file_in_the_place_of_a_folder_is_called_one(folder, tmp_path) -> None:
    put(folder, "a.txt", "1\n")
    with pytest.raises(ConfigError, match=r"a.txt of source 'in' is a file, and .* reads a folder.*'a.txt'"):
        reader_of(texts(folder / "a.txt"), tmp_path)


MARK = "\ufeff".encode()
#: Bytes of a file, and its lines: a mark is one at the beginning alone.
MARKED = [
    (MARK + b"a\nb\n", ["a", "b"]),
    (MARK + b"a", ["a"]),
    (MARK, []),
    (MARK + b"\n", [""]),
    (MARK + MARK + b"a\n", ["\ufeffa"]),
    (b"a\n" + MARK + b"b\n", ["a", "\ufeffb"]),
    (b"", []),
]


@pytest.mark.parametrize(("data", "lines"), MARKED)
@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress])
def test_a_byte_order_mark_is_no_part_of_a_text(folder, data, lines, pack) -> None:
    suffix = {bytes: "", gzip.compress: ".gz", bz2.compress: ".bz2"}[pack]
    for name, form, text, records in (
        ("x.txt", TextLines(), data, lines),
        ("x.csv", CsvFiles(CsvHeader.NONE), data, [line for line in lines if line]),
        ("x.json", JsonLines(), data.replace(b"a", b'{"value":"a"}').replace(b"b", b'{"value":"b"}'), lines),
    ):
        if name == "x.json" and MARK in data[1:]:
            continue
        path = put(folder, name + suffix, pack(text))
        found = [row for one in form.batches(str(path), VALUE) for row in one.column(0).to_pylist()]
        assert found == ([line for line in lines if line] if name == "x.json" else records), name


VALUE = pa.schema([("value", pa.string())])


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-32", "utf-32-be"])
@pytest.mark.parametrize("form", [TextLines(), JsonLines(), CsvFiles(), CsvFiles(CsvHeader.NONE)], ids=repr)
def test_the_mark_of_another_encoding_is_refused_by_name(folder, encoding, form) -> None:
    text = "a,b\n" if encoding in ("utf-16", "utf-32") else "\ufeffa,b\n"
    for name, data in (("x", text.encode(encoding)), ("x.gz", gzip.compress(text.encode(encoding)))):
        with pytest.raises(
            BadLine, match=f"line 1 begins with the byte order mark of {encoding[:6].upper()}"
        ):
            list(form.batches(str(put(folder, name, data)), VALUE))


@pytest.mark.parametrize("discovery", list(Discovery))
def test_a_folder_that_is_moved_away_behind_the_start_is_no_empty_one(folder, tmp_path, discovery) -> None:
    put(folder, "a", "1\n")
    reader = reader_of(texts(folder, discovery=discovery), tmp_path)
    start = reader.initialOffset()
    folder.rename(tmp_path / "away")
    with pytest.raises(SourceUnavailable, match=r"of source 'in' cannot be listed.*FileNotFoundError"):
        reader.latestOffset(start, None)
    # Nothing was decided: the next start of the query finds what is there.
    (tmp_path / "away").rename(folder)
    again = reader_of(texts(folder, discovery=discovery), tmp_path)
    assert first_column(step(again, start)[1]) == ["1"]


def test_a_folder_within_that_cannot_be_listed_is_not_left_out(folder, tmp_path, monkeypatch) -> None:
    put(folder, "a", "1\n", at=1)
    put(folder, "deep/b", "2\n", at=2)
    listing = os.scandir

    def broken(path):
        if os.fspath(path).endswith("deep"):
            raise OSError(errno.EIO, "Input/output error", os.fspath(path))
        return listing(path)

    monkeypatch.setattr(os, "scandir", broken)
    reader = reader_of(texts(folder), tmp_path)
    with pytest.raises(SourceUnavailable, match=r"Input/output error.*deep"):
        reader.latestOffset(reader.initialOffset(), None)
    monkeypatch.undo()
    assert first_column(step(reader_of(texts(folder), tmp_path), reader.initialOffset())[1]) == ["1", "2"]


def test_a_folder_within_that_goes_while_it_is_listed_holds_nothing(folder, tmp_path, monkeypatch) -> None:
    put(folder, "a", "1\n")
    gone = put(folder, "deep/b", "2\n")
    listing = os.scandir

    def late(path):
        if os.fspath(path).endswith("deep"):
            gone.unlink()
            gone.parent.rmdir()
        return listing(path)

    monkeypatch.setattr(os, "scandir", late)
    assert [entry.path for entry in Folders().entries(str(folder), "*")] == [f"{folder}/a"]


def test_links_to_folders_are_not_followed_and_those_to_files_are(folder, tmp_path) -> None:
    put(tmp_path / "other", "b", "2\n")
    (folder / "to-folder").symlink_to(tmp_path / "other")
    (folder / "to-file").symlink_to(tmp_path / "other" / "b")
    (folder / "to-nothing").symlink_to(tmp_path / "nothing")
    reader = reader_of(texts(folder), tmp_path)
    assert first_column(step(reader, reader.initialOffset())[1]) == ["2"]


def test_times_are_read_from_every_format(tmp_path) -> None:
    (tmp_path / "in").mkdir()
    at = datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.UTC)
    pq.write_table(pa.table({"at": pa.array([at])}), tmp_path / "in" / "a.parquet")
    reader = reader_of(FileSource(str(tmp_path / "in"), ParquetFiles(), "at TIMESTAMP"), tmp_path)
    assert step(reader, reader.initialOffset())[1] == [(at, 0, 0)]
    FileSource(str(tmp_path / "in"), CsvFiles(), "at TIMESTAMP")
    put(tmp_path / "in", "b.json", '{"at": "2026-01-02T03:04:05Z", "day": "2026-01-02"}\n{}\n')
    texts = FileSource(str(tmp_path / "in"), JsonLines(), "day DATE, at TIMESTAMP", pattern="*.json")
    reader = reader_of(texts, tmp_path / "of-json")
    assert step(reader, reader.initialOffset())[1] == [(at.date(), at, 0, 0), (None, None, 0, 1)]


@pytest.mark.parametrize(
    ("form", "schema", "end"),
    [
        (TextLines(), "value STRING", b".txt.gz"),
        (JsonLines(), "value STRING", b".json"),
        (CsvFiles(), "value STRING", b".csv"),
        (ParquetFiles(), "value STRING", b".parquet"),
    ],
)
def test_a_name_is_bytes_that_need_be_no_text(folder, tmp_path, form, schema, end) -> None:
    """Of another machine's encoding; it is read, kept in the list, and shown by errors."""
    data = {b".json": b'{"value": "x"}\n', b".csv": b"value\nx\n", b".gz": gzip.compress(b"x\n")}
    name = b"d\xe9/\xff" + end
    path = os.path.join(os.fsencode(folder), name)
    os.mkdir(os.path.dirname(path))
    if end == b".parquet":
        pq.write_table(pa.table({"value": ["x"]}), tmp_path / "plain")
        os.replace(tmp_path / "plain", path)
    else:
        with open(path, "wb") as file:
            file.write(data[end[end.rindex(b".") :]])
    source = FileSource(str(folder), form, schema, discover_every_ms=1, discovery=Discovery.CONTINUOUS)
    reader = reader_of(source, tmp_path)
    position, rows = step(reader, reader.initialOffset())
    assert first_column(rows) == ["x"]
    again = reader_of(source, tmp_path)
    assert first_column(rows_of(again, reader.initialOffset(), position)) == ["x"]
    assert step(again, position) == (position, [])
    with open(path, "ab") as file:
        file.write(b"more")
    with pytest.raises(InputLostError, match=r"/d\\xe9/\\xff.* has changed"):
        step(again, position)
