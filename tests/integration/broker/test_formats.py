"""Keys and values in every format, through jobs that crash, with a real schema registry."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import uuid
from collections import Counter
from dataclasses import replace

import fastavro
import pytest

from flinkish_spark import (
    Avro,
    Csv,
    DeadLetter,
    FixedDelay,
    Json,
    JsonSchema,
    KafkaSink,
    KafkaSource,
    OnBadRecord,
    OnSchemaChange,
    Protobuf,
    Registration,
    SchemaRegistry,
    String,
)
from flinkish_spark.connectors.formats.avro import AvroReader, parse_schema
from flinkish_spark.connectors.formats.json_schema import derive_schema
from flinkish_spark.connectors.formats.registry import NoSuchSchema, client_of
from flinkish_spark.core.errors import BadRecordError, SchemaError
from flinkish_spark.sources import KafkaRecordsSource
from flinkish_spark.types.ddl import parse_ddl
from tests.support.formats_app import (
    AVRO,
    JSON_SCHEMA,
    PLAIN,
    PROTOBUF,
    ROLES,
    ROWS,
    Way,
    forms,
)
from tests.support.jobs import (
    await_that,
    environment,
    failure_of,
    produce,
    read_committed,
    run_until,
    running,
)
from tests.support.services import ROOT
from tests.support.two_phase_app import crash_at

pytestmark = pytest.mark.timeout(300)


def exact(text: bytes, names) -> str:
    """An object with every number as it is written, but for a DOUBLE, which has several texts."""
    found = json.loads(text, parse_float=str, parse_int=str)
    if "ratio" in found:
        found["ratio"] = float(found["ratio"])
    return json.dumps([found.get(name) for name in names])


def registered(registry, subject: str, form: str, fields: str) -> None:
    """Let the subject be there: a source without a schema takes its newest."""
    if form.startswith("avro"):
        registry.register(subject, AVRO)
    elif form.startswith("protobuf"):
        text = 'syntax = "proto3"; package shop; message Other {} message Order { string user = 1; '
        registry.register(subject, text + "int64 n = 2; double ratio = 3; bool ok = 4; }", "PROTOBUF")
    else:
        registry.register(subject, derive_schema(parse_ddl(fields)), "JSON")


CASES = [
    pytest.param(form, marks=[] if form == "avro, registry" else [pytest.mark.nightly])
    for form in forms("http://nowhere")
]


@pytest.mark.parametrize("form", CASES)
def test_a_round_trip_through_jobs_that_crash(spark, broker, topic, registry, job_dir, form):
    servers, source, between, out = broker.bootstrap_servers, topic(2), topic(2), topic(2)
    known = forms(registry.url)[form]
    if "registry" in form:
        registered(registry, f"{between}-value", form, known.fields)
    for role, way in (("writer", Way(form, source, between)), ("reader", Way(form, between, out))):

        def job(role=role, way=way):
            env = environment(spark, job_dir / role, job=role)
            ROLES[role](env, servers, [way], {form: known})
            return env

        for point in ("decision:after:1", "sink-commit:before:1"):
            if role == "writer":
                produce(servers, source, [row.encode() for row in ROWS])
            crash_at(job(), point)
        if role == "writer":
            produce(servers, source, [row.encode() for row in ROWS])
        run_until(job(), lambda _, into=way.out: len(read_committed(servers, into)) >= 9)
    check_trip(servers, out, known, times=3)


def check_trip(servers, out, form, times):
    """Each row came back so often, with its key, and no other."""
    found = [one.value for one in read_committed(servers, out)]
    given = Counter(exact(row, form.names) for row in ROWS)
    assert Counter(exact(one, form.names) for one in found) == {row: times for row in given}
    assert {json.loads(one)["key_user"] for one in found} == {json.loads(row)["user"] for row in ROWS}


@pytest.mark.nightly
@pytest.mark.timeout(2_400)
def test_a_round_trip_through_processes_that_are_killed(broker, topic, registry, tmp_path):
    """SIGKILL for driver, JVM and workers, of jobs with all formats: one that writes, then one that reads."""
    servers, source, known = broker.bootstrap_servers, topic(2), forms(registry.url)
    between, out = ({form: topic(2) for form in known} for _ in range(2))
    for form in known:
        if "registry" in form:
            registered(registry, f"{between[form]}-value", form, known[form].fields)
    writer = [Way(form, source, between[form]) for form in known]
    reader = [Way(form, between[form], out[form]) for form in known]
    for role, ways in (("writer", writer), ("reader", reader)):
        for kill in ("staged-file:after:1", "decision:after:1", "sink-commit:after:5", ""):
            if role == "writer":
                produce(servers, source, [row.encode() for row in ROWS])
            wanted = 0 if kill else 4 * len(ROWS)
            words = [role, str(tmp_path), servers, json.dumps(ways), registry.url, str(wanted), kill]
            command = [sys.executable, "-m", "tests.support.formats_app", *words]
            ended = subprocess.run(command, cwd=ROOT, timeout=400, start_new_session=True, check=False)
            assert ended.returncode == (-9 if kill else 0), (role, kill)
    for form in known:
        check_trip(servers, out[form], known[form], times=4)


def test_a_real_registry_answers_as_its_client_expects(registry):
    client = client_of(SchemaRegistry(registry.url))
    item = (
        '{"type": "record", "name": "Item", "namespace": "shop", "fields": [{"name": "q", "type": "long"}]}'
    )
    subject = f"item-{uuid.uuid4().hex}"
    registry.register(subject, item)
    order = ORDERS % ', {"name": "item", "type": "shop.Item"}'
    references = [{"name": "shop.Item", "subject": subject, "version": 1}]
    number = registry.register(f"{subject}-order", order, references=references)
    found = client.find_by_id(number)
    assert (found.kind, found.references) == ("AVRO", (("shop.Item", item),))
    whole = json.dumps(parse_schema(found.text, found.references))
    kind = AvroReader(whole, "value", None, OnSchemaChange.FAIL).kind
    assert kind.simpleString() == "struct<user:string,item:struct<q:bigint>>"
    newest = client.newest(f"{subject}-order")
    assert (newest.schema_id, newest.version) == (number, 1)
    with pytest.raises(NoSuchSchema):
        client.find_by_id(2**31 - 1)
    with pytest.raises(NoSuchSchema):
        client.newest(f"{subject}-missing")


ORDERS = '{"type": "record", "name": "Order", "fields": [{"name": "user", "type": "string"}%s]}'
V1, V2 = ORDERS % "", ORDERS % ', {"name": "note", "type": ["null", "string"], "default": null}'


def avro_record(number: int, *texts: str) -> bytes:
    """A record of the wire format: a text, and a text in a union behind it."""
    first, *rest = (bytes([2 * len(text)]) + text.encode() for text in texts)
    return bytes([0]) + number.to_bytes(4, "big") + first + b"".join(b"\2" + one for one in rest)


def users_job(spark, job_dir, servers, source, out, value, **settings):
    env = environment(spark, job_dir, **settings)
    users = env.from_source(KafkaSource(servers, [source], value=value), uid="users")
    users.sink_to(KafkaSink(servers, out, value=Json()), uid="out")
    return env


def written(servers, out) -> list[dict]:
    found = [json.loads(one.value) for one in read_committed(servers, out)]
    return sorted(found, key=lambda one: one["user"])


def test_a_schema_that_changes_while_the_job_runs(spark, broker, topic, registry, job_dir):
    """The job starts again with a new column, which is null in records from before."""
    servers, source, out = broker.bootstrap_servers, topic(1), topic(1)
    first = registry.register(f"{source}-value", V1)
    produce(servers, source, [avro_record(first, "a")])
    evolving = Avro(registry=SchemaRegistry(registry.url), on_schema_change=OnSchemaChange.EVOLVE)
    with running(users_job(spark, job_dir, servers, source, out, evolving)) as client:
        await_that(lambda: written(servers, out), client)
        second = registry.register(f"{source}-value", V2)
        produce(servers, source, [avro_record(second, "b", "new"), avro_record(first, "c")])
        await_that(lambda: len(written(servers, out)) == 3, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=180_000)
    assert written(servers, out) == [
        {"user": "a"},
        {"user": "b", "note": "new"},
        {"user": "c", "note": None},
    ]
    facts = {one.name for one in (job_dir / "facts").glob("schema-*")}
    assert (
        len(facts) == 3
        and "schema-users-value.json" in facts
        and f"schema-users-value-1-{first}.json" in facts
    )
    assert any(one.endswith(f"-{second}.json") for one in facts)


@pytest.mark.nightly
def test_a_column_that_changes_while_the_job_runs(spark, broker, topic, registry, job_dir):
    """No field more, but values that the job's schema has no place for: a symbol, null, more bits."""
    servers, source, out = broker.bootstrap_servers, topic(1), topic(1)

    def schema(number: object, *symbols: str) -> dict:
        size = {"type": "enum", "name": "Size", "symbols": symbols}
        kinds = {"user": "string", "n": number, "size": size}
        return {
            "type": "record",
            "name": "Order",
            "fields": [{"name": n, "type": k} for n, k in kinds.items()],
        }

    def record(schema: dict, number: int, **values: object) -> bytes:
        made = io.BytesIO()
        fastavro.schemaless_writer(made, fastavro.parse_schema(schema), values)
        return bytes([0]) + number.to_bytes(4, "big") + made.getvalue()

    old, new = schema("int", "S"), schema(["null", "long"], "S", "L")
    first = registry.register(f"{source}-value", json.dumps(old))
    produce(servers, source, [record(old, first, user="a", n=1, size="S")])
    evolving = Avro(registry=SchemaRegistry(registry.url), on_schema_change=OnSchemaChange.EVOLVE)
    with running(users_job(spark, job_dir, servers, source, out, evolving)) as client:
        await_that(lambda: written(servers, out), client)
        second = registry.register(f"{source}-value", json.dumps(new))
        later = [dict(user="b", n=2**40, size="L"), dict(user="c", n=None, size="S")]
        produce(servers, source, [record(new, second, **one) for one in later])
        produce(servers, source, [record(old, first, user="d", n=4, size="S")])
        await_that(lambda: len(written(servers, out)) == 4, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=180_000)
    assert written(servers, out) == [
        {"user": "a", "n": 1, "size": "S"},
        *later,
        {"user": "d", "n": 4, "size": "S"},
    ]


@pytest.mark.nightly
def test_a_job_keeps_the_schema_that_it_began_with(spark, broker, topic, registry, job_dir):
    """As its directory says. FAIL ends it, and names the field; LEAVE_OUT goes on without."""
    servers, other, its_out = broker.bootstrap_servers, topic(1), topic(1)
    number = registry.register(f"{other}-value", V1)
    produce(servers, other, [avro_record(number, "a")])
    keeping = Avro(registry=SchemaRegistry(registry.url))
    run_until(
        users_job(spark, job_dir, servers, other, its_out, keeping), lambda _: written(servers, its_out)
    )
    number = registry.register(f"{other}-value", V2)
    produce(servers, other, [avro_record(number, "b", "new")])
    error = failure_of(users_job(spark, job_dir, servers, other, its_out, keeping))
    assert isinstance(error, SchemaError) and "'note'" in str(error) and f"schema {number}" in str(error)
    leaving = Avro(registry=SchemaRegistry(registry.url), on_schema_change=OnSchemaChange.LEAVE_OUT)
    run_until(
        users_job(spark, job_dir, servers, other, its_out, leaving),
        lambda _: len(written(servers, its_out)) == 2,
    )
    assert written(servers, its_out) == [{"user": "a"}, {"user": "b"}]


@pytest.mark.nightly
def test_a_registry_that_is_away_makes_no_record_bad(spark, broker, topic, own_registry, job_dir):
    """A job whose policy is to drop waits, restarts, and loses nothing."""
    servers, source, out = broker.bootstrap_servers, topic(1), topic(1)
    registry = SchemaRegistry(own_registry.url, timeout_ms=500, retry_ms=1_500)
    value = Avro(
        V1, registry=registry, on_schema_change=OnSchemaChange.LEAVE_OUT, on_bad_record=OnBadRecord.DROP
    )
    first = own_registry.register(f"{source}-value", V1)
    second = own_registry.register(f"{source}-value", V2)
    produce(servers, source, [avro_record(first, "a")])
    env = users_job(
        spark, job_dir, servers, source, out, value, restart_strategy=FixedDelay(attempts=50, delay_ms=100)
    )
    with running(env) as client:
        await_that(lambda: written(servers, out), client)
        with own_registry.away():
            produce(servers, source, [avro_record(second, "b", "x"), b"no record", avro_record(first, "c")])
            await_that(lambda: client.progress.restarts >= 2, client)
            assert written(servers, out) == [{"user": "a"}]
        await_that(lambda: len(written(servers, out)) == 3, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=180_000)
    assert written(servers, out) == [{"user": "a"}, {"user": "b"}, {"user": "c"}]


def letters_in(servers, topic) -> dict[bytes, str]:
    found = {
        one.value: dict(one.headers)["flinkish-detail"].decode() for one in read_committed(servers, topic)
    }
    return dict(sorted(found.items()))


BAD = {
    "string": (String("user"), [b"a"], {b"\xff": "the value is not UTF-8"}),
    "csv": (
        Csv("user STRING, n INT"),
        [b"a,1"],
        {
            b"b": "the line has 1 values, and there are 2 fields",
            b"c,x": "the field 'n' is no int: 'x'",
            b"d,99999999999": "a value does not fit its column's type",
        },
    ),
    "avro": (Avro(V1), [b"\2a"], {b"\4a": "the bytes end within", b"\2ax": "1 bytes follow"}),
    "protobuf": (
        Protobuf(PROTOBUF, "shop.Order"),
        [b"\n\1a"],
        {b"\xff": "the bytes are no shop.Order", b"\n\1\xff": "the bytes are no shop.Order"},
    ),
    "json schema": (
        JsonSchema(JSON_SCHEMA),
        [b'{"user": "a"}'],
        {
            b'{"n": 1}': "it is not valid by its JSON Schema: the object: 'user' is a required property",
            b'{"user": "b", "n": "x"}': "it is not valid by its JSON Schema: n: 'x' is not of type 'integer'",
            b"{": "it is no JSON",
        },
    ),
}


@pytest.mark.nightly
@pytest.mark.parametrize("reader", ["kafka", "records"])
@pytest.mark.parametrize("form", list(BAD))
def test_bad_records_under_the_three_policies(spark, broker, topic, job_dir, form, reader):
    servers, source, letters = broker.bootstrap_servers, topic(1), topic(1)
    value, good, bad = BAD[form]
    produce(servers, source, [*good, *bad])
    for name, policy in (
        ("letter", DeadLetter(letters)),
        ("drop", OnBadRecord.DROP),
        ("fail", OnBadRecord.FAIL),
    ):
        out = topic(1)
        env = environment(spark, job_dir / name)
        reads = replace(value, on_bad_record=policy)
        if reader == "records":
            kafka = KafkaRecordsSource(servers, [source], value=reads)
        else:
            kafka = KafkaSource(servers, [source], value=reads)
        env.from_source(kafka, uid="in").sink_to(KafkaSink(servers, out, value=Json()), uid="out")
        if name == "fail":
            error = failure_of(env)
            assert isinstance(error, BadRecordError), error
            assert error.offset == len(good) and next(iter(bad.values())) in str(error)
            continue
        client = run_until(env, lambda _, out=out: written(servers, out))
        assert [one["user"] for one in written(servers, out)] == ["a"]
        if name == "drop":
            assert client.progress.dropped == len(bad)
    told = letters_in(servers, letters)
    assert told.keys() == bad.keys()
    assert all(told[data].startswith(why) for data, why in bad.items()), told


@pytest.mark.nightly
def test_rows_that_do_not_fit_and_schemas_that_are_not_compatible(spark, broker, topic, registry, job_dir):
    servers, source, out, letters = broker.bootstrap_servers, topic(1), topic(1), topic(1)
    rows_in = ['{"user": "a", "n": 1}', '{"n": 2}', '{"user": "c", "n": 3}']
    produce(servers, source, [row.encode() for row in rows_in])
    schema = JSON_SCHEMA.replace('"integer"', '"integer", "maximum": 2')

    def job(value, name):
        env = environment(spark, job_dir / name)
        given = env.from_source(KafkaSource(servers, [source], value=Json(PLAIN)), uid="in")
        sink = KafkaSink(servers, out, value=value, on_bad_record=DeadLetter(letters))
        given.sink_to(sink, uid="out")
        return env

    env = job(JsonSchema(schema, registry=SchemaRegistry(registry.url)), "a")
    run_until(env, lambda _: len(read_committed(servers, letters)) == 2)
    (good,) = read_committed(servers, out)
    assert good.value[:1] == b"\0" and json.loads(good.value[5:]) == {"user": "a", "n": 1}
    told = sorted(letters_in(servers, letters).values())
    assert [one.partition(" does not fit its format: ")[2] for one in told] == [
        "it is not valid by its JSON Schema: n: 3 is greater than the maximum of 2",
        "it is not valid by its JSON Schema: the object: 'user' is a required property",
    ]
    subject = f"{out}-value"
    registry.ask(f"config/{subject}", {"compatibility": "FULL"}, "PUT")
    other = JSON_SCHEMA.replace('"integer"', '"integer", "maximum": 1')
    with pytest.raises(SchemaError, match=f"does not take the schema of subject '{subject}'"):
        job(JsonSchema(other, fields="", registry=SchemaRegistry(registry.url)), "b").execute()
    required = SchemaRegistry(registry.url, registration=Registration.REQUIRED)
    with pytest.raises(SchemaError, match=f"subject '{subject}'"):
        job(JsonSchema(other, registry=required), "c").execute()
