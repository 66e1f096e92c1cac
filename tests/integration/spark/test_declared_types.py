"""Types as text: Spark's own parser beside ours; fields that must not be null, in a job."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.errors import ParseException
from pyspark.sql.types import DataType, _parse_datatype_string

from flinkish_spark import KeyedProcessFunction, MemorySink
from flinkish_spark.core.errors import UserFunctionError
from flinkish_spark.jars import running_minor
from tests.support.ddl_table import NEW_IN_4_2, ONLY_SPARKS, READ, REFUSED
from tests.support.jobs import await_that, environment, rows

pytestmark = pytest.mark.timeout(600)


def test_what_is_read_and_what_is_refused_is_so_in_spark(spark: Any) -> None:
    unknown = NEW_IN_4_2 if running_minor() == "4.1" else ()
    for text, kind in READ.items():
        if text not in unknown:
            assert _parse_datatype_string(text) == kind, text
    for text in (*REFUSED, *unknown):
        with pytest.raises(ParseException):
            pytest.fail(f"Spark reads {text!r} as {_parse_datatype_string(text)}")
    for text in ONLY_SPARKS:
        assert isinstance(_parse_datatype_string(text), DataType)


class Places(KeyedProcessFunction):
    """Says where a user is and how long it took; an amount of 13 is nowhere."""

    def process_element(self, value: Any, ctx: Any) -> Iterator[Any]:
        x = None if value.amount == 13 else value.amount
        yield value.user, datetime.timedelta(hours=value.amount), [{"x": x}, None], None


def test_a_field_that_must_not_be_null_is_not(spark: Any, tmp_path: Any) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def feed(name: str, *amounts: int) -> None:
        lines = [json.dumps({"user": f"u{amount}", "amount": amount}) for amount in amounts]
        (folder / f".{name}").write_text("\n".join(lines))
        (folder / f".{name}").rename(folder / f"{name}.json")

    feed("0", 1, 2, 3)
    env = environment(spark, tmp_path / "job", trigger_interval_ms=100)
    frame = spark.readStream.schema("user STRING, amount INT").json(str(folder))
    places = (
        env.from_dataframe(frame, uid="files")
        .key_by("user")
        .process(
            Places(),
            output="user STRING NOT NULL COMMENT 'who', took INTERVAL DAY TO SECOND, "
            "places ARRAY<STRUCT<x INT NOT NULL>> NOT NULL, nothing VOID",
            uid="places",
        )
    )
    kept = places.map(
        lambda place: (place.user, place.places),
        output="user STRING NOT NULL, places ARRAY<STRUCT<x INT NOT NULL>>",
    )
    sinks = {name: MemorySink(f"{tmp_path}/{name}") for name in ("places", "kept")}
    places.sink_to(sinks["places"], uid="places-out")
    kept.sink_to(sinks["kept"], uid="kept-out")
    client = env.execute_async()
    await_that(lambda: rows(client, "kept-out") == 3, client)
    feed("1", 4, 13)
    with pytest.raises(UserFunctionError) as failure:
        client.wait()
    assert failure.value.facts["uid"] == "places"
    says = "The function emitted a wrong value: field 'places.element.x' is None and must not be null"
    assert says in str(failure.value)
    found = {row["user"]: row for row in sinks["places"].rows()}
    assert set(found) <= {"u1", "u2", "u3"}
    for row in found.values():
        amount = int(row["user"][1:])
        assert row["took"] == datetime.timedelta(hours=amount) and row["nothing"] is None
        assert [place and place["x"] for place in row["places"]] == [amount, None]
