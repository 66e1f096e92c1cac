"""Which columns formats become, what a job keeps of a registry's schemas, and what cannot be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flinkish_spark import (
    Avro,
    Csv,
    DebeziumAvro,
    Json,
    JsonSchema,
    KafkaSource,
    OnSchemaChange,
    OnTombstone,
    Protobuf,
    Raw,
    SchemaRegistry,
    String,
)
from flinkish_spark.connectors.formats import registered
from flinkish_spark.connectors.formats.registry import NoSuchSchema, RegistrySchema
from flinkish_spark.connectors.kafka.records import Decoding
from flinkish_spark.contracts.format import Format
from flinkish_spark.contracts.source import NO_JOB, JobPlace
from flinkish_spark.core.errors import ConfigError, FlinkishError, SchemaError
from flinkish_spark.core.formats import OnBadRecord
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.ids import CheckpointId

REGISTRY = SchemaRegistry("http://registry")
FIELDS = '{"type": "record", "name": "Order", "fields": [{"name": "a", "type": "int"}%s]}'
MORE = ', {"name": "b", "type": ["null", "string"], "default": null}'


class Newest:
    """A registry whose subjects have one schema each, until it is another one."""

    def __init__(self) -> None:
        self.schema = RegistrySchema("AVRO", FIELDS % "", (), 7, "orders-value", 1)
        self.subjects: list[str] = []

    def newest(self, subject: str) -> RegistrySchema:
        self.subjects.append(subject)
        if "missing" in subject:
            raise NoSuchSchema(subject)
        return self.schema


@pytest.fixture
def newest(monkeypatch: pytest.MonkeyPatch) -> Newest:
    made = Newest()
    monkeypatch.setattr(registered, "client_of", lambda _: made)
    return made


@pytest.fixture
def place(tmp_path: Path) -> JobPlace:
    return JobPlace(StoreSpec.parse(str(tmp_path)), "/nonexistent")


def columns(form: Format, place: JobPlace, topics: tuple[str, ...] = ("orders",)) -> str:
    return form.find_reader("value", "in", place, topics).fields.simpleString()


def test_a_job_reads_by_the_schema_that_it_began_with(newest: Newest, place: JobPlace) -> None:
    assert columns(Avro(registry=REGISTRY), place) == "struct<a:int>"
    newest.schema = RegistrySchema("AVRO", FIELDS % MORE, (), 8, "orders-value", 2)
    assert columns(Avro(registry=REGISTRY), place) == "struct<a:int>"
    assert columns(Avro(registry=REGISTRY), NO_JOB) == "struct<a:int,b:string>"
    assert newest.subjects == ["orders-value"] * 2
    evolving = Avro(registry=REGISTRY, on_schema_change=OnSchemaChange.EVOLVE)
    assert place.job_dir is not None
    for _ in range(2):
        assert columns(evolving, place) == "struct<a:int,b:string>"
    kept = sorted(place.job_dir.open().list("facts"))
    assert kept == ["facts/schema-in-value-1-8.json", "facts/schema-in-value.json"]


def test_a_checkpoint_tells_by_which_schema_it_was_read(
    newest: Newest, place: JobPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    evolving = Avro(registry=REGISTRY, on_schema_change=OnSchemaChange.EVOLVE)
    decided = [CheckpointId(1)]
    monkeypatch.setattr(JobDir, "list_checkpoint_ids", lambda _: tuple(decided))
    assert place.job_dir is not None
    columns(evolving, place)
    newest.schema = RegistrySchema("AVRO", FIELDS % MORE, (), 8, "orders-value", 2)
    decided.append(CheckpointId(5))
    for _ in range(2):
        columns(evolving, place)
    del decided[1:]  # A rewind.
    columns(evolving, place)
    kept = [one for one in place.job_dir.open().list("facts") if "-7" in one or "-8" in one]
    assert sorted(kept) == [f"facts/schema-in-value-{one}.json" for one in ("2-7", "2-8", "6-8")]


def test_what_a_job_keeps_holds_all_that_its_schema_refers_to(newest: Newest, place: JobPlace) -> None:
    item = '{"type": "record", "name": "Item", "fields": [{"name": "q", "type": "long"}]}'
    order = FIELDS % ', {"name": "i", "type": "Item"}'
    newest.schema = RegistrySchema("AVRO", order, (("Item", item),), 9, "orders-value", 1)
    for _ in range(2):
        assert columns(Avro(registry=REGISTRY), place) == "struct<a:int,i:struct<q:bigint>>"
    assert len(newest.subjects) == 1


@pytest.mark.parametrize(
    ("form", "topics", "why"),
    [
        (Avro(registry=REGISTRY), ("a", "b"), "the source reads 2 topics"),
        (Avro(registry=REGISTRY), (), "the source reads 0 topics"),
        (Avro(registry=REGISTRY), ("missing",), "the registry has no subject 'missing-value'"),
        (
            Protobuf(registry=REGISTRY),
            ("orders",),
            "is AVRO, and the value of source 'in' is read as PROTOBUF",
        ),
    ],
)
def test_a_schema_that_cannot_be_found(
    newest: Newest, form: Format, topics: tuple[str, ...], why: str
) -> None:
    with pytest.raises(FlinkishError) as refused:
        columns(form, NO_JOB, topics)
    assert why in str(refused.value)


def test_a_subject_serves_several_topics(newest: Newest) -> None:
    form = Avro(registry=SchemaRegistry("http://registry", subject="orders"))
    assert columns(form, NO_JOB, ("a", "b")) == "struct<a:int>"
    assert newest.subjects == ["orders"]


@pytest.mark.parametrize(
    ("form", "found"),
    [
        (Json("a INT"), "struct<a:int>"),
        (Csv("a INT, b STRING"), "struct<a:int,b:string>"),
        (String(), "struct<value:string>"),
        (Raw("data"), "struct<data:binary>"),
        (Avro(FIELDS % MORE), "struct<a:int,b:string>"),
        (JsonSchema('{"properties": {"a": {"type": "integer"}}}'), "struct<a:bigint>"),
        (JsonSchema('{"type": "object"}', fields="a DECIMAL(10,2)"), "struct<a:decimal(10,2)>"),
    ],
)
def test_columns_that_a_format_says_itself(form: Format, found: str) -> None:
    assert columns(form, NO_JOB) == found


@pytest.mark.parametrize(
    "make",
    [
        lambda: KafkaSource("b:9092", ["t"], value=Csv("a ARRAY<INT>")),
        lambda: KafkaSource("b:9092", ["t"], value=Avro()),
        lambda: KafkaSource("b:9092", ["t"], value=Avro(FIELDS % "", schema_id=3)),
        lambda: KafkaSource("b:9092", ["t"], value=Protobuf(b"no descriptor")),
        lambda: KafkaSource("b:9092", ["t"], value=Protobuf()),
        lambda: KafkaSource("b:9092", ["t"], value=JsonSchema('{"type": "object"}')),
        lambda: KafkaSource("b:9092", ["t"], value="json"),  # type: ignore[arg-type]
        lambda: KafkaSource("b:9092", ["t"], value=Json("a INT"), key="a"),  # type: ignore[arg-type]
        lambda: KafkaSource("b:9092", ["t"], value=Json("a INT"), key=Json("A INT")),
        lambda: KafkaSource("b:9092", ["t"], value=Json("a INT"), key=String("k", OnBadRecord.DROP)),
        lambda: KafkaSource("b:9092", ["t"], value=String("_topic"), metadata=["topic"]),
        lambda: Csv("a INT", delimiter='"'),
        lambda: JsonSchema("{"),
        lambda: JsonSchema("[]"),
    ],
)
def test_formats_that_cannot_be_are_refused_when_they_are_made(make: Callable[[], Any]) -> None:
    with pytest.raises((ConfigError, SchemaError)):
        make()


def test_key_and_value_stand_beside_each_other() -> None:
    for key, value, prefix, found in (
        (Json("a INT"), Json("a STRING"), "key_", "key_a:int,a:string"),
        (String("k"), Raw(), "", "k:string,value:binary"),
        (Json("a INT, b INT"), Csv("c INT, a INT"), "", "b:int,c:int,a:int"),
        (Avro(FIELDS % ""), String(), "k.", "k.a:int,value:string"),
    ):
        decoding = Decoding(value, key=key, key_fields_prefix=prefix)
        columns = decoding.deserializer("in", NO_JOB, ["t"]).fields
        assert columns.simpleString() == f"struct<{found}>"


def test_the_columns_of_debezium_in_avro_are_those_of_its_rows(newest: Newest, place: JobPlace) -> None:
    row = FIELDS % MORE
    before = f'{{"name": "before", "type": ["null", {row}]}}'
    others = '{"name": "after", "type": ["null", "Order"]}, {"name": "op", "type": "string"}'
    envelope = f'{{"type": "record", "name": "Envelope", "fields": [{before}, {others}]}}'
    newest.schema = RegistrySchema("AVRO", envelope, (), 7, "orders-value", 1)
    decoding = Decoding(DebeziumAvro(registry=REGISTRY), key=Json("k INT"), tombstones=OnTombstone.DROP)
    made = decoding.deserializer("in", place, ["orders"])
    assert made.fields.simpleString() == "struct<k:int,a:int,b:string>"
    assert place.job_dir is not None
    assert list(place.job_dir.open().list("facts")) == ["facts/schema-in-value.json"]
    newest.schema = RegistrySchema("AVRO", row, (), 8, "orders-value", 2)
    with pytest.raises(SchemaError, match="no envelope"):
        decoding.deserializer("in", NO_JOB, ["orders"])
