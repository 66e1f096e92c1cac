"""Manifests: one record per confirmed checkpoint, whatever is repeated, and never before the sinks."""

from __future__ import annotations

import json

import pytest

from flinkish_spark import DeltaManifest, DeltaSink, KafkaManifest, KafkaSink
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.contracts.manifest import ManifestContext
from flinkish_spark.core.errors import GraphError, SchemaError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.decisions import ManifestRecord, SinkShare
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, JobUuid, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import Outcome
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    environment,
    failure_of,
    order,
    orders_source,
    produce,
    read_committed,
    read_delta,
    rows,
    run_until,
)

JOB = JobUuid("0" * 31 + "1")


def record(checkpoint: int) -> ManifestRecord:
    shares = {"kafka": SinkShare(3, 1, 0, {}), "table": SinkShare(3, 0, 0, {"version": checkpoint})}
    batch = BatchId(checkpoint)
    return ManifestRecord(
        CheckpointId(checkpoint),
        Lineage(0),
        batch,
        batch,
        1_000,
        CheckpointPurpose.PERIODIC,
        shares,
        {"t": {0: 9}},
    )


def context(tmp_path, epoch=1) -> ManifestContext:
    return ManifestContext(JOB, OwnerEpoch(epoch), "a job", LocalStore(tmp_path / "job"))


def records_in(broker, topic):
    return [json.loads(r.value) for r in read_committed(broker.bootstrap_servers, topic)]


@pytest.mark.nightly
def test_a_job_writes_one_record_per_checkpoint_and_its_facts(spark, broker, topic, job_dir, tmp_path):
    source, sink, manifest, table = topic(2), topic(), topic(), tmp_path / "table"

    def job(where):
        env = environment(spark, job_dir, manifest=where)
        stream = env.from_source(orders_source(broker.bootstrap_servers, source), uid="orders")
        totals = stream.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(KafkaSink(broker.bootstrap_servers, sink, key="user"), uid="kafka")
        totals.sink_to(DeltaSink(str(table)), uid="delta")
        return env

    def confirmed():
        folder = JobDir(LocalStore(job_dir))
        return [int(c) for c in folder.list_checkpoint_ids() if folder.receipt(c) is not None]

    produce(broker.bootstrap_servers, source, [order("a", n) for n in range(10)], key=b"a")
    run_until(job(KafkaManifest(broker.bootstrap_servers, manifest)), lambda c: rows(c, "delta") >= 10)
    found = records_in(broker, manifest)
    assert [r["checkpoint"] for r in found][-len(confirmed()) :] == confirmed()
    assert sum(r["sinks"]["delta"]["rows"] for r in found) == 10
    assert sum(found[-1]["offsets"][source].values()) == 10
    assert found[0]["job_name"] == "orders"
    # The next start writes to a table instead: the checkpoints that come.
    produce(broker.bootstrap_servers, source, [order("a", n) for n in range(5)], key=b"a")
    run_until(job(DeltaManifest(str(tmp_path / "manifest"))), lambda c: rows(c, "delta") >= 5)
    assert len(records_in(broker, manifest)) == len(found)
    written = read_delta(tmp_path / "manifest")
    ids = sorted(r["checkpoint"] for r in written)
    assert ids == [*range(found[-1]["checkpoint"] + 1, ids[-1] + 1)]
    newest = max(written, key=lambda r: r["checkpoint"])
    assert dict(dict(newest["offsets"])[source]) and sum(dict(dict(newest["offsets"])[source]).values()) == 15


def test_a_repeated_record_is_written_once_by_any_owner(spark, broker, topic, tmp_path):
    manifest = KafkaManifest(broker.bootstrap_servers, topic())
    first = manifest.create_writer(spark, context(tmp_path))
    assert first.write(record(4)).outcome is Outcome.COMMITTED
    assert first.write(record(4)).outcome.is_done
    other = manifest.create_writer(spark, context(tmp_path, 2))
    assert other.write(record(4)).outcome.is_done
    assert other.write(record(5)).outcome is Outcome.COMMITTED
    assert [r["checkpoint"] for r in records_in(broker, manifest.topic)] == [4, 5]


class StopsBefore(Exception):
    """A crash."""


@pytest.mark.parametrize("call", ["create_if_absent", "commit"])
def test_a_crash_between_two_steps_leaves_one_record(spark, broker, topic, tmp_path, monkeypatch, call):
    manifest = KafkaManifest(broker.bootstrap_servers, topic())
    crashing = manifest.create_writer(spark, context(tmp_path))

    def crash(*given):
        raise StopsBefore

    where = LocalStore if call == "create_if_absent" else TransactionClient
    with monkeypatch.context() as patch, pytest.raises(StopsBefore):
        patch.setattr(where, call, crash)
        crashing.write(record(4))
    assert manifest.create_writer(spark, context(tmp_path, 2)).write(record(4)).outcome.is_done
    with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as client:
        for left in client.list_open_transactions(JOB):
            # As the sweep of any Kafka sink does.
            client.abort_open(left.transactional_id)
    assert [r["checkpoint"] for r in records_in(broker, manifest.topic)] == [4]


def test_a_staged_record_that_timed_out_is_staged_again(spark, broker, topic, tmp_path, monkeypatch):
    manifest = KafkaManifest(broker.bootstrap_servers, topic())
    writer = manifest.create_writer(spark, context(tmp_path))
    with monkeypatch.context() as patch, pytest.raises(StopsBefore):
        patch.setattr(TransactionClient, "commit", lambda *given: (_ for _ in ()).throw(StopsBefore()))
        writer.write(record(4))
    with TransactionClient(KafkaConnection(broker.bootstrap_servers)) as client:
        (left,) = client.list_open_transactions(JOB)
        client.abort_open(left.transactional_id)
    assert writer.write(record(4)).outcome is Outcome.COMMITTED
    assert writer.write(record(4)).outcome.is_done
    assert [r["checkpoint"] for r in records_in(broker, manifest.topic)] == [4]


def test_a_delta_manifest_takes_a_record_once(spark, tmp_path):
    manifest = DeltaManifest(str(tmp_path / "manifest"))
    for _ in range(2):
        writer = manifest.create_writer(spark, context(tmp_path))
        assert writer.write(record(4)).outcome.is_done
    (row,) = read_delta(tmp_path / "manifest")
    assert (row["checkpoint"], row["decided_at"].timestamp()) == (4, 1.0)
    assert json.loads(dict(row["sinks"])["table"]["facts"]) == {"version": 4}


def test_what_cannot_be_a_manifest_is_refused(spark, broker, topic, job_dir, tmp_path):
    def job(manifest):
        env = environment(spark, job_dir, manifest=manifest)
        stream = env.from_source(orders_source(broker.bootstrap_servers, topic()), uid="orders")
        stream.sink_to(KafkaSink(broker.bootstrap_servers, topic()), uid="kafka")
        return env

    unknown = failure_of(job(KafkaManifest(broker.bootstrap_servers, "no-such-topic")))
    assert isinstance(unknown, GraphError) and "no-such-topic" in str(unknown)
    spark.range(3).write.format("delta").save(str(tmp_path / "other"))
    other = failure_of(job(DeltaManifest(str(tmp_path / "other"))))
    assert isinstance(other, SchemaError) and "is no manifest" in str(other)
