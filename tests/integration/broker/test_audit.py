"""`flinkish audit` on real topics and tables: exact ones, and each fault that it is there to find."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from kafka import KafkaProducer
from pyarrow import parquet

from flinkish_spark import DeltaSink, KafkaSink, RecordHeaders
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.records import SinkAck, StagedBatch, TaskAck
from tests.support.cli_rig import JobOnDisk, flinkish
from tests.support.jobs import (
    await_that,
    environment,
    order,
    orders_source,
    produce,
    rows,
    run_until,
    running,
)

ZEROS = {"lost": 0, "duplicated": 0, "reordered": 0, "partial_checkpoints": 0, "unexpected": 0}
ORIGIN = ("topic", "partition", "offset")


@dataclass(frozen=True)
class Row:
    """A record of the output: of the input's partition and offset, written by a micro-batch."""

    partition: int
    offset: int
    batch: str = "0/0"
    key: str = "k"
    to: int = 0
    uid: str = ""
    job: str = ""


class Audited:
    """A job directory and real topics: what the job wrote is what a test says."""

    def __init__(self, root: Path, servers: str, source: str, sink: str) -> None:
        self.on_disk, self.servers, self.source, self.sink = JobOnDisk(root), servers, source, sink
        self.job_dir: JobDir = self.on_disk.job_dir
        self.producer = KafkaProducer(bootstrap_servers=servers, linger_ms=5)

    def send_input(self, partitions: int, each: int) -> None:
        for partition in range(partitions):
            for number in range(each):
                self.producer.send(self.source, b"%d" % number, partition=partition)
        self.producer.flush()

    def send(self, *sent: Row) -> None:
        for one in sent:
            headers = [("flinkish-batch", one.batch)] if one.batch else []
            if one.uid:
                headers += [("flinkish-job", one.job or str(self.on_disk.uuid)), ("flinkish-uid", one.uid)]
            headers += [("_topic", self.source)]
            headers += [("_partition", str(one.partition)), ("_offset", str(one.offset))]
            encoded = [(name, value.encode()) for name, value in headers]
            self.producer.send(self.sink, b"v", one.key.encode(), headers=encoded, partition=one.to)

    def send_aborted(self, partition: int) -> None:
        """Send a record of the input that nobody may see."""
        producer = KafkaProducer(bootstrap_servers=self.servers, transactional_id=f"of-{self.source}")
        producer.init_transactions()
        producer.begin_transaction()
        producer.send(self.source, b"aborted", partition=partition).get(timeout=10)
        producer.abort_transaction()
        producer.close()
        self.producer.flush()

    def decide(
        self, checkpoint: int, ends: Sequence[int], rows_by_batch: dict[str, int], receipt: bool = True
    ) -> None:
        """Decide a checkpoint that read up to `ends` by partition."""
        batches = tuple(
            StagedBatch(
                Lineage(int(name.split("/")[0])),
                BatchId(int(name.split("/")[1])),
                OwnerEpoch(1),
                checkpoint,
                (SinkAck("out", (TaskAck(0, count, 0),)),),
                (),
            )
            for name, count in rows_by_batch.items()
        )
        position = {self.source: {str(partition): end for partition, end in enumerate(ends)}}
        offsets = f"v1\n{{}}\n{json.dumps(position)}"
        decision = Decision(
            CheckpointId(checkpoint), Verdict.COMMIT, OwnerEpoch(1), 1, batches=batches, offsets_text=offsets
        )
        self.job_dir.create_decision(replace(decision, lineage=batches[-1].lineage))
        if receipt:
            self.job_dir.create_receipt(Receipt(CheckpointId(checkpoint), OwnerEpoch(1), 2))

    def audit(self, *words: object, output: str = "", status: int | None = None) -> dict[str, Any]:
        where = ("--bootstrap-servers", self.servers, "--input", self.source)
        out = ("--output", output or f"out=kafka:{self.sink}")
        result = flinkish("audit", self.on_disk.root, *where, *out, *words, "--json")
        assert result.stdout.count("\n") == 1, result.output
        found = json.loads(result.stdout)
        zeros = {name: found[name] for name in ZEROS}
        assert result.exit_code == (any(zeros.values()) if status is None else status)
        return {**found, "zeros": zeros}


@pytest.fixture
def audited(broker, topic, tmp_path: Path) -> Iterator[Audited]:
    """Twenty records in two partitions, copied by two checkpoints of two micro-batches each."""
    made = Audited(tmp_path / "job", broker.bootstrap_servers, topic(partitions=2), topic(partitions=2))
    made.send_input(2, 10)
    made.decide(1, (5, 5), {"0/0": 6, "0/1": 4})
    made.decide(2, (10, 10), {"0/2": 6, "0/3": 4})
    yield made
    made.producer.close()


def copied() -> list[Row]:
    """What the job of the fixture writes, in order."""
    parts = {"0/0": (0, 3), "0/1": (3, 5), "0/2": (5, 8), "0/3": (8, 10)}
    return [
        Row(partition, offset, batch, key=f"user-{offset % 3}", to=partition)
        for batch, (start, end) in parts.items()
        for partition in (0, 1)
        for offset in range(start, end)
    ]


def test_a_topic_without_our_header_says_nothing_of_checkpoints(audited) -> None:
    audited.send(*(replace(row, batch="") for row in copied()))
    found = audited.audit()
    assert found["zeros"] == {**ZEROS, "partial_checkpoints": None}
    assert "no record has the header flinkish-batch" in json.dumps(found)


def test_an_exact_topic_is_found_exact(audited: Audited) -> None:
    audited.send(*copied())
    found = audited.audit()
    assert found["zeros"] == ZEROS and found["records"] == 20 and found["checkpoint"] == 2
    assert found["input"] == {audited.source: {"0": [0, 10], "1": [0, 10]}}
    assert found["outputs"]["out"]["rows"] == 20 and found["outputs"]["out"]["unnamed"] == 0
    table = flinkish(
        "audit", audited.on_disk.root, "--bootstrap-servers", audited.servers, "--input", audited.source,
        "--output", f"out=kafka:{audited.sink}",
    )  # fmt: skip
    assert table.exit_code == 0 and "0 lost, 0 duplicated, 0 reordered, 0 partial checkpoints" in table.stdout


def test_a_duplicate_is_found(audited: Audited) -> None:
    """In the header of another micro-batch it makes that one too large, too."""
    sent = copied()
    audited.send(*sent, replace(sent[3], batch="0/3"))
    found = audited.audit()
    assert found["zeros"] == {**ZEROS, "duplicated": 1, "partial_checkpoints": 1}
    assert f"duplicated in 'out': {audited.source}-1 offset 0" in found["examples"]


def test_a_loss_is_found_also_where_another_record_hides_it_in_the_count(audited: Audited) -> None:
    sent = copied()
    audited.send(*sent[1:6], sent[1], *sent[6:])
    found = audited.audit()
    assert found["zeros"] == {**ZEROS, "lost": 1, "duplicated": 1}, "six of micro-batch 0/0 are visible"
    assert f"missing in 'out': {audited.source}-0 offset 0" in found["examples"]


def test_records_of_a_key_in_another_order_are_found(audited: Audited) -> None:
    sent = copied()
    of_key = [row for row in sent if row.key == "user-0" and row.partition == 0]
    assert [row.offset for row in of_key[:2]] == [0, 3]
    swapped = [replace(r, offset={0: 3, 3: 0}.get(r.offset, r.offset)) if r in of_key else r for r in sent]
    audited.send(*swapped)
    assert audited.audit()["zeros"] == {**ZEROS, "reordered": 1}


def test_a_checkpoint_of_which_nothing_or_a_part_is_visible_is_found(audited: Audited) -> None:
    audited.send(*(row for row in copied() if row.batch in ("0/0", "0/1", "0/2")))
    found = audited.audit()
    assert found["zeros"] == {**ZEROS, "lost": 4, "partial_checkpoints": 1}
    assert "'out' shows 6 rows of checkpoint 2, decided are 10" in found["examples"]


def test_rows_without_a_decision_are_found_and_later_ones_of_a_running_job_are_not(audited: Audited) -> None:
    audited.send_input(2, 2)
    audited.send(*copied(), Row(0, 10, "0/4"), Row(1, 10, "0/4"))
    assert audited.audit()["zeros"] == {**ZEROS, "partial_checkpoints": 1}
    audited.decide(3, (11, 11), {"0/4": 3}, receipt=False)
    found = audited.audit()
    assert found["zeros"] == ZEROS and found["checkpoint"] == 2 and found["outputs"]["out"]["outside"] == 2


def test_what_is_behind_an_open_transaction_is_said(audited: Audited) -> None:
    """It is not lost: a transaction of somebody else began before it, and its readers wait."""
    stranger = KafkaProducer(bootstrap_servers=audited.servers, transactional_id=f"x-{audited.sink}")
    stranger.init_transactions()
    stranger.begin_transaction()
    stranger.send(audited.sink, b"x", partition=1).get(timeout=10)
    audited.send(*copied())
    found = audited.audit()
    assert found["lost"] == 10
    assert found["outputs"]["out"]["notes"] == [
        f"11 offsets of {audited.sink} are behind open transactions, and not visible"
    ]
    stranger.abort_transaction()
    stranger.close()
    assert audited.audit()["outputs"]["out"]["notes"] == []


def test_two_sinks_of_a_job_share_a_topic_and_another_job_s_names_are_none_of_ours(audited: Audited) -> None:
    """With the headers of `FULL`."""
    sent = [replace(row, uid="out") for row in copied()]
    audited.send(*(one for row in sent for one in (row, replace(row, uid="second"))))
    assert audited.audit()["zeros"] == ZEROS
    audited.send(replace(sent[0], uid="out", job="e" * 32, batch="0/99"))
    assert audited.audit()["zeros"] == {**ZEROS, "duplicated": 1}


def test_offsets_can_be_given(audited: Audited) -> None:
    audited.send(*(row for row in copied() if row.batch in ("0/2", "0/3")))
    found = audited.audit("--from", json.dumps({audited.source: {"0": 5, "1": 5}}))
    assert (found["lost"], found["partial_checkpoints"], found["records"]) == (0, 1, 10)
    found = audited.audit("--complete", "none")
    assert found["lost"] == 0 and found["outputs"]["out"]["lost"] is None
    # Of a partition that is not named the newest checkpoint tells, as ever.
    found = audited.audit("--to", json.dumps({audited.source: {"0": 5}}))
    assert found["input"] == {audited.source: {"0": [0, 5], "1": [0, 10]}}
    words = ("audit", audited.on_disk.root, "--bootstrap-servers", audited.servers)
    numbers = [f'{{"t": {{"0": {number}}}}}' for number in ("-1", "1.5", "1e400", "NaN", "true", '"x"')]
    for wrong in ("[]", "{}", *numbers, '{"t": 5}', "x"):
        spec = ("--input", audited.source, "--output", "out=kafka:t", "--from", wrong)
        assert flinkish(*words, *spec).exit_code == 2
    spec = ("--input", audited.source, "--output", f"out=kafka:{audited.sink}")
    for option, place, offset, said in (
        ("--from", f'"{audited.source}": {{"0"', 11, "begins at offset 11, after its end at 10"),
        ("--to", f'"{audited.source}": {{"0"', 10**13, "ends at offset 10"),
        ("--to", f'"{audited.source}": {{"7"', 1, "is no partition of the input"),
        ("--from", '"typo": {"0"', 1, "typo-0 is no partition of the input"),
    ):
        result = flinkish(*words, *spec, option, f"{{{place}: {offset}}}}}")
        assert result.exit_code == 1 and said in result.stderr, result.output
    for spec in ("out", "out=file:x", "=kafka:x"):
        assert flinkish(*words, "--input", audited.source, "--output", spec).exit_code == 2
    no_sink = flinkish(*words, "--input", audited.source, "--output", f"other=kafka:{audited.sink}")
    assert no_sink.exit_code == 1 and "no sink 'other'" in no_sink.stderr


def test_a_sink_that_chooses_the_topic_has_several(audited: Audited, topic) -> None:
    sent, first = copied(), audited.sink
    audited.send(*(row for row in sent if row.offset % 2))
    audited.sink = topic(partitions=2)
    audited.send(*(row for row in sent if not row.offset % 2))
    both = f"out=kafka:{first},{audited.sink}"
    assert audited.audit(output=both)["zeros"] == ZEROS
    half = audited.audit(output=f"out=kafka:{first}")
    assert half["zeros"] == {**ZEROS, "lost": 10, "partial_checkpoints": 2}


def test_rows_that_do_not_say_where_they_come_from_are_refused(audited: Audited, topic) -> None:
    foreign = topic()
    produce(audited.servers, foreign, [order("ann")])
    words = ("audit", audited.on_disk.root, "--bootstrap-servers", audited.servers)
    result = flinkish(*words, "--input", audited.source, "--output", f"out=kafka:{foreign}")
    assert result.exit_code == 1 and "none of the 1 rows of 'out' says where it comes from" in result.stderr


def test_files_are_compared_by_their_columns(audited: Audited, tmp_path: Path) -> None:
    folder = tmp_path / "files"
    folder.mkdir()
    sent = copied()
    columns = {
        "_topic": [audited.source] * len(sent),
        "_partition": pa.array([row.partition for row in sent], pa.int32()),
        "_offset": [row.offset for row in sent],
        "flinkish-batch": [row.batch for row in sent],
    }
    table = pa.table(columns)
    parquet.write_table(table.slice(0, 12), folder / "a.parquet")
    parquet.write_table(table.slice(12), folder / "b.parquet")
    parquet.write_table(table, folder / "_temporary.parquet")
    assert audited.audit(output=f"out=parquet:{folder}")["zeros"] == ZEROS
    parquet.write_table(table.slice(12, 6), folder / "b.parquet")
    found = audited.audit(output=f"out=parquet:{folder}")
    assert found["zeros"] == {**ZEROS, "lost": 2, "partial_checkpoints": 1}
    assert found["outputs"]["out"]["reordered"] is None


@pytest.mark.nightly
def test_a_real_job_is_exact_until_somebody_adds_a_record(spark, broker, topic, job_dir, tmp_path) -> None:
    """Kafka and Delta, with the columns of `metadata`; then a duplicate by hand."""
    servers, source, copies, table = broker.bootstrap_servers, topic(2), topic(2), tmp_path / "table"
    for partition in (0, 1):
        produce(servers, source, [order(f"user-{n % 5}", n) for n in range(40)], partition=partition)

    def job():
        env = environment(spark, job_dir)
        settings = {"metadata": ORIGIN, "max_offsets_per_trigger": 50}
        orders = env.from_source(orders_source(servers, source, **settings), uid="orders")
        kafka = KafkaSink(servers, copies, key="user", record_headers=RecordHeaders.BATCH)
        orders.sink_to(kafka, uid="kafka")
        orders.sink_to(DeltaSink(str(table)), uid="delta")
        return env

    def audit() -> tuple[int, dict[str, Any]]:
        words = ("audit", job_dir, "--bootstrap-servers", servers, "--input", source)
        words += ("--output", f"kafka=kafka:{copies}", "--output", f"delta=delta:{table}", "--json")
        result = flinkish(*words)
        return result.exit_code, json.loads(result.stdout)

    with running(job()) as client:
        # While the job runs: what is confirmed by now is whole.
        await_that(lambda: client.progress.checkpoints >= 1, client)
        assert audit()[0] == 0
        await_that(lambda: rows(client, "kafka") == 80, client)
        client.stop_with_checkpoint()
        assert client.wait(timeout_ms=240_000)
    status, found = audit()
    assert status == 0, found
    assert {name: found[name] for name in ZEROS} == ZEROS and found["records"] == 80
    assert [one["rows"] for one in found["outputs"].values()] == [80, 80]
    body = {"user": "user-0", "_topic": source, "_partition": 1, "_offset": 0}
    produce(servers, copies, [json.dumps(body).encode()], key=b"user-0")
    # The job goes on behind it, and the audit still knows the record that is none of its.
    produce(servers, source, [order("user-1")], partition=0)
    run_until(job(), lambda client: rows(client, "kafka") == 1)
    status, found = audit()
    assert status == 1 and {name: found[name] for name in ZEROS} == {**ZEROS, "duplicated": 1}
    assert found["outputs"]["delta"]["duplicated"] == 0 and found["records"] == 81


def test_what_an_output_no_longer_has_is_said(audited: Audited, topic) -> None:
    """A compacted topic may have superseded records, and a table may be somewhere else."""
    audited.sink = topic(partitions=2, configs={"cleanup.policy": "compact"})
    audited.send(*copied())
    assert audited.audit()["outputs"]["out"]["notes"] == [
        f"{audited.sink} is compacted; deleted records count as lost"
    ]
    found = audited.audit(output="out=delta:/no/such/table")
    assert found["lost"] == 20 and "there is no table" in found["outputs"]["out"]["notes"][0]
    words = ("audit", audited.on_disk.root, "--bootstrap-servers", audited.servers)
    unknown = flinkish(*words, "--input", audited.source, "--output", "out=kafka:no-such-topic")
    assert unknown.exit_code == 1 and "no-such-topic" in unknown.stderr and "Traceback" not in unknown.output
    unread = flinkish(*words, "--input", audited.sink, "--output", f"out=kafka:{audited.sink}")
    assert unread.exit_code == 1 and "has no position in topic" in unread.stderr
