"""Lines of JSON files: what is one object a line, and what must never come to Arrow."""

from __future__ import annotations

import datetime
import json
import random
import subprocess
import sys

import pyarrow as pa
import pytest

from flinkish_spark.connectors.files.input_formats import BadLine, json_batches

SCHEMA = pa.schema([("n", pa.int64()), ("name", pa.string()), ("deep", pa.struct([("x", pa.int64())]))])


def rows(data: bytes):
    return [row for batch in json_batches(data, SCHEMA) for row in batch.select(["n", "name"]).to_pylist()]


def numbers(data: bytes):
    return [row["n"] for row in rows(data)]


@pytest.mark.parametrize(
    "data",
    [
        b'{"n": 1}\n{"n": 2}',
        b'{"n": 1}\r\n{"n": 2}\r\n',
        b'\xef\xbb\xbf{"n": 1}\n{"n": 2}\n',
        b'\n\n \t{"n": 1} \t\r\n \r\n\n{"n": 2}\n   ',
        b'\xef\xbb\xbf\n{"n": 1}\n{"n": 2, "null": [{}, null], "more": {"}": "{"}}',
    ],
)
def test_marks_blanks_and_ends_of_lines_are_no_matter(data) -> None:
    assert numbers(data) == [1, 2]


@pytest.mark.parametrize("data", [b"", b"\n", b" \r\n\t", b"\xef\xbb\xbf", b"\xef\xbb\xbf\n"])
def test_a_file_without_lines_has_no_records(data) -> None:
    assert numbers(data) == []


@pytest.mark.parametrize(
    ("data", "line"),
    [
        # Arrow would take the process with it.
        (b'null\n{"n":1}\n', 1),
        (b'null null\n{"n":1}\n', 1),
        (b'null{"n":1}\n', 1),
        (b'null\r{"n":1}\n', 1),
        (b'\xef\xbb\xbfnull\n{"n":1}\n', 1),
        (b"nullnull\n", 1),
        (b"\n\n\tnull", 3),
        # It would make other records of it than lines.
        (b'{"n":1} null', 1),
        (b'{"n":1}\n null \r\n', 2),
        (b'{"n":1}\n{"n":1} null {"n":1}', 2),
        (b'{"n":1}\n\n{"n":2}{"n":3}', 3),
        (b'{"n":1}\r{"n":2}\n', 1),
        (b'{"n":1}\n{"n":\n2}\n', 2),
        # It would refuse it, without the line.
        (b'{"n":1}\n{"n":"x"}', 2),
        (b'{"n":1}\n{"n":2', 2),
        (b'{"n":1}\n[{"n":2}]', 2),
        (b'{"n":1}\n5', 2),
        (b'{"n":1}\n{"n":1,"n":2}', 2),
        (b'{"n":1}\n\x00', 2),
        (b'{"n":1}\n\x0b\n', 2),
        # It would pass it on.
        (b'{"n":1}\n\n{"name":"\xff"}', 3),
        (b'{"n":1}\n{"other":"\xed\xa0\x80"}', 2),
    ],
)
def test_a_line_that_is_not_one_object_is_refused_by_its_number(data, line) -> None:
    with pytest.raises(BadLine, match=rf"^line {line} "):
        rows(data)


def test_a_long_object_is_read_and_lines_are_counted_on() -> None:
    long = b'{"name": "' + b"x" * 3_000_000 + b'", "n": 2}\n'
    many = b'{"n": 1}\n' * 150_000
    assert numbers(many + long + many) == [1] * 150_000 + [2] + [1] * 150_000
    assert numbers(long[:-1]) == [2]
    with pytest.raises(BadLine, match=r"^line 300002 is no JSON object"):
        rows(many + long + many + b"null")
    with pytest.raises(BadLine, match=r"^line 150001 cannot be read"):
        rows(many + long.replace(b"2", b"true"))


def mutated(seed: int, count: int):
    """Yield what is near to lines of objects."""
    dice = random.Random(seed)
    objects = [b"{}", b'{"n":1}', b'{"name":"x"}', b'{"deep":{"x":null}}', b'{"deep":null,"n":2}']
    parts = [
        b"null",
        b"{",
        b"}",
        b"[",
        b"]",
        b'"',
        b",",
        b":",
        b"\n",
        b"\r",
        b" ",
        b"\\",
        b"\xff",
        b"\x00",
        b"1",
    ]
    parts += [b"\xef\xbb\xbf", b"\\ud800", b"NaN", b"//", b'"n":1', *objects]
    for _ in range(count):
        data = b"\n".join(dice.choices(objects, k=dice.randint(1, 3)))
        for _ in range(dice.randint(0, 4)):
            at = dice.randint(0, len(data))
            data = data[:at] + dice.choice(parts) + data[at + dice.choice([0, 0, 1, 3]) :]
        yield data


def look_at(seed: int, count: int) -> None:
    """Read them; a record per line, or the error of a line."""
    for data in mutated(seed, count):
        lines = sum(bool(line.strip(b" \t\r")) for line in data.removeprefix(b"\xef\xbb\xbf").split(b"\n"))
        try:
            batches = list(json_batches(data, SCHEMA))
        except BadLine:
            continue
        for batch in batches:
            batch.validate(full=True)
        assert sum(batch.num_rows for batch in batches) == lines, data


def test_nothing_near_to_such_lines_ends_the_process_or_goes_as_other_records() -> None:
    """In a process of its own, which could die."""
    code = "from tests.unit.connectors.files.test_json_lines import look_at; look_at(7, 8_000)"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-2_000:]


DATED = pa.schema(
    [
        ("day", pa.date32()),
        ("days", pa.list_(pa.date32())),
        ("stay", pa.struct([("from", pa.date32()), ("nights", pa.int64())])),
    ]
)


def test_dates_are_read_however_deep_they_are() -> None:
    first, second = datetime.date(2026, 1, 31), datetime.date(2026, 2, 1)
    data = b'{"days": ["2026-01-31", null, "2026-02-01"]}\n'
    data += b'{"stay": {"from": "2026-02-01"}, "day": "2026-01-31"}\n'
    [batch] = json_batches(data, DATED)
    assert batch.to_pylist() == [
        {"day": None, "days": [first, None, second], "stay": None},
        {"day": first, "days": None, "stay": {"from": second, "nights": None}},
    ]
    assert batch.schema.equals(DATED)


@pytest.mark.parametrize("wrong", ["2026-02-31", "2026-01-31T12:00:00", "today", ""])
def test_a_text_that_is_no_date_is_told_with_its_line(wrong) -> None:
    data = b'{"day": "2026-01-31"}\n\n' + json.dumps({"day": wrong}).encode() + b"\n{}\n"
    with pytest.raises(BadLine, match=r"^line 3 cannot be read: "):
        list(json_batches(data, DATED))
