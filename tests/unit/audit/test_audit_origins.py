"""Origins in headers, in JSON values and in columns."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from flinkish_spark.audit.decided import BatchName
from flinkish_spark.audit.outputs import (
    OriginNames,
    OriginReader,
    hash_keys,
    header_column,
    json_columns,
    texts,
)
from flinkish_spark.connectors.kafka.client.batches import HEADERS_TYPE
from flinkish_spark.core.errors import SchemaError

PLACES = [("in", 0), ("in", 2), ("other", 1)]
NAMES = OriginNames()


def headers(**values: object) -> list[dict[str, Any]]:
    return [{"key": f"_{name}", "value": str(value).encode()} for name, value in values.items()]


def records(values: list[bytes | None], of_each: list[list[dict[str, Any]] | None]) -> pa.RecordBatch:
    columns = {"value": pa.array(values, pa.binary()), "headers": pa.array(of_each, HEADERS_TYPE)}
    return pa.record_batch(list(columns.values()), names=list(columns))


def places(origins) -> list[tuple[int, int, bool]]:
    columns = (origins.places.tolist(), origins.offsets.tolist(), origins.is_named.tolist())
    return list(zip(*columns, strict=True))


def test_headers_say_where_a_record_comes_from() -> None:
    first = headers(topic="in", partition=2, offset=2**40)
    batch = records(
        [b"x"] * 6,
        [
            [{"key": "more", "value": None}, *first, *headers(offset=1)],
            None,
            headers(topic="in", partition=1, offset=7),
            headers(topic="nobody", partition=0, offset=7),
            headers(topic="other", partition=1, offset=0),
            headers(topic="other", partition=1),
        ],
    )
    found = OriginReader(NAMES, PLACES).read_records(batch)
    assert places(found) == [
        (1, 2**40, True),
        (-1, 0, False),
        (-1, 7, True),
        (-1, 7, True),
        (2, 0, True),
        (-1, 0, False),
    ]
    # Also of a part of a batch.
    assert places(OriginReader(NAMES, PLACES).read_records(batch.slice(4, 1))) == [(2, 0, True)]


def test_json_fields_say_it_where_headers_do_not() -> None:
    values = [
        json.dumps(
            {"user": "a\nb", "_topic": "in", "_partition": 0, "_offset": 2**53 + 1}, indent=2
        ).encode(),
        None,
        json.dumps({"_offset": 3, "_partition": 2, "_topic": "in", "more": {"_offset": 9}}).encode(),
        b'{"user": "no origin"}',
    ]
    found = OriginReader(NAMES, PLACES).read_records(records(values, [None] * 4))
    assert places(found) == [(0, 2**53 + 1, True), (-1, 0, False), (1, 3, True), (-1, 0, False)]
    texts = [json.dumps({"_topic": "in", "_partition": "0", "_offset": "12"}).encode()]
    assert places(OriginReader(NAMES, PLACES).read_records(records(texts, [None]))) == [(0, 12, True)]


def test_values_that_are_no_json_have_no_origin() -> None:
    for values in ([b"\x00\x01"], [b"[1]"], [b""], [None], []):
        found = OriginReader(NAMES, PLACES).read_records(records(values, [None] * len(values)))
        assert not found.is_named.any() and len(found.offsets) == len(values)
    assert json_columns(pa.array([b"[1]", b"{}{}"], pa.binary()), list(NAMES.all)) is None


def test_a_record_of_somebody_else_hides_no_other() -> None:
    """One that is no JSON, has other types, or says in headers what the others say in their values."""
    ours = [b'{"_topic": "in", "_partition": 0, "_offset": %d}' % offset for offset in (1, 2)]
    strange = (b"plain text", b"[1]", b"{}{}", b"\xff", b'{"_topic": "in", "_partition": 0, "_offset": 1.5}')
    strange += (b'{"_topic": {"a": 1}, "_partition": 0, "_offset": 1}', b'{"_offset": true}', b"[" * 100_000)
    for value in strange:
        found = OriginReader(NAMES, PLACES).read_records(records([ours[0], value, ours[1]], [None] * 3))
        assert [places(found)[at] for at in (0, 2)] == [(0, 1, True), (0, 2, True)], value[:60]
        assert not found.is_named[1]
    as_text = b'{"_topic": "in", "_partition": "2", "_offset": "7"}'
    found = OriginReader(NAMES, PLACES).read_records(records([ours[0], as_text], [None] * 2))
    assert places(found) == [(0, 1, True), (1, 7, True)]
    in_headers = [None, headers(topic="other", partition=1, offset=5), headers(topic="other"), None]
    found = OriginReader(NAMES, PLACES).read_records(records([ours[0], b"x", ours[1], b"x"], in_headers))
    assert places(found) == [(0, 1, True), (2, 5, True), (0, 2, True), (-1, 0, False)]


def test_columns_say_it_as_numbers_or_texts() -> None:
    rows = pa.record_batch(
        [
            pa.array(["in", None, "other"]),
            pa.array([0, 0, 1], pa.int32()),
            pa.array([4, 5, None], pa.int64()),
        ],
        names=list(NAMES.all),
    )
    assert places(OriginReader(NAMES, PLACES).read_rows(rows)) == [
        (0, 4, True),
        (-1, 5, False),
        (-1, 0, False),
    ]
    one = OriginNames.of("p,o")
    rows = pa.record_batch([pa.array(["0", "2"]), pa.array([1, 2])], names=["p", "o"])
    found = OriginReader(one, [("in", 0), ("in", 2)]).read_rows(rows)
    assert places(found) == [(0, 1, True), (1, 2, True)]


def test_what_is_no_number_is_named() -> None:
    batch = records([b"x"], [headers(topic="in", partition="zero", offset=1)])
    with pytest.raises(SchemaError, match="'_partition' of an output is not a whole number"):
        OriginReader(NAMES, PLACES).read_records(batch)


@pytest.mark.parametrize("text", ["", "a", "a,", "a,b,c,d", ",,"])
def test_names_are_two_or_three(text: str) -> None:
    with pytest.raises(ValueError, match="is not TOPIC"):
        OriginNames.of(text)


def test_keys_are_told_apart_and_so_are_places() -> None:
    keys = pa.array([b"a", b"b", b"a", b"a"], pa.binary())
    hashes = hash_keys(keys, np.array([0, 0, 0, 1]))
    assert hashes[0] == hashes[2] and len(set(hashes.tolist())) == 3
    assert len(hash_keys(keys.slice(0, 0), np.zeros(0, np.int64))) == 0
    assert header_column(pa.array([], HEADERS_TYPE), "x").to_pylist() == []


def test_a_header_that_is_no_text_is_one_of_somebody_else() -> None:
    """One such record of a stranger's does not end the audit."""
    foreign = [{"key": "_topic", "value": b"\xff"}, *headers(partition=0, offset=7)]
    found = OriginReader(NAMES, PLACES).read_records(
        records([b"x", b"x"], [foreign, headers(topic="in", partition=0, offset=1)])
    )
    assert places(found) == [(-1, 7, True), (0, 1, True)]
    label = texts(pa.array([b"\xff/1", b"0/1", None]))
    assert [BatchName.of(one) if one else None for one in label.to_pylist()][0::2] == [None, None]
    assert BatchName.of("0/" + "9" * 5_000) is None and str(BatchName.of("0/1")) == "0/1"
