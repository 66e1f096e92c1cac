"""One decision for all: Kafka, two Delta tables, files and a database show a checkpoint, or none does."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from pathlib import Path

import pytest

from flinkish_spark import DeltaManifest, DeltaSink, FileFormat, FileSink, FixedDelay, JdbcSink, KafkaSink
from flinkish_spark.connectors.kafka.client.admin import KafkaAdmin
from flinkish_spark.connectors.kafka.client.connection import KafkaConnection
from flinkish_spark.connectors.kafka.client.transactions import TransactionClient
from flinkish_spark.core.errors import AnotherTimelineError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.steps import SilentObserver, Step
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.ids import CheckpointId
from tests.support.jobs import (
    TOTAL,
    RunningTotal,
    await_that,
    end,
    environment,
    expected_totals,
    failure_of,
    order,
    orders_source,
    produce,
    read_delta,
    rows,
    run_until,
    totals_in,
)
from tests.support.open_transactions import still_open

SINKS = ("kafka", "delta-1", "delta-2", "files", "jdbc")


class Everywhere:
    """The places that one job writes to."""

    def __init__(self, spark, broker, job_dir, source, sink, folder: Path) -> None:
        self.spark, self.broker, self.job_dir = spark, broker, job_dir
        self.source, self.sink, self.folder = source, sink, folder
        self.database, self.produced = folder / "totals.db", 0

    def env(self):
        manifest = DeltaManifest(str(self.folder / "manifest"))
        env = environment(
            self.spark,
            self.job_dir,
            manifest=manifest,
            restart_strategy=FixedDelay(attempts=20, delay_ms=100),
        )
        source = orders_source(self.broker.bootstrap_servers, self.source, group_id=f"g-{self.sink}")
        totals = env.from_source(source, uid="orders")
        totals = totals.key_by("user").process(RunningTotal(), output=TOTAL, uid="totals")
        totals.sink_to(KafkaSink(self.broker.bootstrap_servers, self.sink, key="user"), uid="kafka")
        totals.sink_to(DeltaSink(str(self.folder / "one")), uid="delta-1")
        totals.sink_to(DeltaSink(str(self.folder / "other")), uid="delta-2")
        totals.sink_to(FileSink(str(self.folder / "files"), FileFormat.JSON), uid="files")
        url = f"jdbc:sqlite:{self.database}"
        totals.sink_to(JdbcSink(url, "totals", create_table=True), uid="jdbc")
        return env

    def seen(self) -> dict[str, Counter]:
        """What readers of each sink see now."""
        found = {"kafka": totals_in(self.broker.bootstrap_servers, self.sink)}
        for uid, table in (("delta-1", "one"), ("delta-2", "other")):
            path = self.folder / table
            lines = read_delta(path) if (path / "_delta_log").exists() else []
            found[uid] = Counter((row["user"], row["total"]) for row in lines)
        lines = [
            json.loads(line)
            for file in (self.folder / "files").rglob("*.json")
            if not any(part.startswith(("_", ".")) for part in file.relative_to(self.folder).parts)
            for line in file.read_text().splitlines()
        ]
        found["files"] = Counter((row["user"], row["total"]) for row in lines)
        found["jdbc"] = self.in_database()
        return found

    def in_database(self) -> Counter:
        with sqlite3.connect(self.database) as database:
            tables = {name for (name,) in database.execute("SELECT name FROM sqlite_master")}
            pairs = database.execute("SELECT user, total FROM totals") if "totals" in tables else ()
            return Counter(tuple(pair) for pair in pairs)

    def open_transactions(self):
        with TransactionClient(KafkaConnection(self.broker.bootstrap_servers)) as client:
            return still_open(client, JobDir(LocalStore(self.job_dir)).find_uuid())


class Steps(SilentObserver):
    """Notes the steps of a checkpoint; interrupts the job right behind one of them, once."""

    def __init__(self, interrupt_after: tuple[Step, str] | None = None) -> None:
        self.taken: list[tuple[Step, str]] = []
        self.interrupt_after, self.client = interrupt_after, None

    def on_step_end(self, step, subject):
        self.taken.append((step, subject))
        if (step, subject) == self.interrupt_after and self.client is not None:
            # As a kill does: whatever comes next waits for the next start.
            self.interrupt_after = None
            self.client.cancel()


@pytest.fixture
def everywhere(spark, broker, topic, job_dir, tmp_path) -> Everywhere:
    return Everywhere(spark, broker, job_dir, topic(2), topic(2), tmp_path)


def test_five_sinks_commit_in_their_order_with_one_receipt(everywhere) -> None:
    """Behaviour 155: sinks as declared, then what goes by checkpoints, manifest, group offsets, receipt."""
    produce(
        everywhere.broker.bootstrap_servers, everywhere.source, [order("a", n) for n in range(40)], key=b"a"
    )
    env, steps = everywhere.env(), Steps()
    env.observe(steps)
    client = env.execute_async()
    try:
        await_that(lambda: rows(client, "jdbc") >= 40, client, timeout_s=200)
        client.stop_with_checkpoint()
        assert client.wait(240_000)
    finally:
        end(client)
    folder = JobDir(LocalStore(everywhere.job_dir))
    checkpoint = next(c for c in folder.list_checkpoint_ids() if _has_data(folder, c))
    at = steps.taken.index((Step.DECISION, str(checkpoint)))
    receipt = steps.taken.index((Step.RECEIPT, str(checkpoint)))
    taken = [
        (s, who) for s, who in steps.taken[at : receipt + 1] if s not in (Step.STAGED_FILE, Step.SPARK_COMMIT)
    ]
    assert taken == [
        (Step.DECISION, str(checkpoint)),
        *((Step.SINK_COMMIT, uid) for uid in SINKS),
        *((Step.SINK_COMPLETE, uid) for uid in SINKS),
        (Step.MANIFEST, str(checkpoint)),
        (Step.GROUP_OFFSETS, str(checkpoint)),
        (Step.RECEIPT, str(checkpoint)),
    ]
    expected = expected_totals({"a": list(range(40))})
    assert everywhere.seen() == dict.fromkeys(SINKS, expected)
    facts = folder.receipt(checkpoint).facts
    assert facts["delta-1"]["version"] == facts["delta-2"]["version"] == 0
    assert facts["files"]["rows"] == 40
    manifest = read_delta(everywhere.folder / "manifest")
    assert (
        sorted(r["checkpoint"] for r in manifest)
        == [int(c) for c in folder.list_checkpoint_ids() if folder.receipt(c) is not None][-len(manifest) :]
    )


@pytest.mark.nightly
def test_a_job_directory_that_is_an_older_copy_is_refused_by_every_sink(everywhere) -> None:
    """A backup that is put back: ids that sinks know belong to other rows."""
    here, backup = everywhere.job_dir, everywhere.folder / "backup"
    _run_until_all_show(everywhere, 10)
    shutil.copytree(here, backup, symlinks=True)
    before = max(JobDir(LocalStore(backup)).list_checkpoint_ids())
    _run_until_all_show(everywhere, 30)
    newest = JobDir(LocalStore(here)).newest_commit().checkpoint
    here.rename(everywhere.folder / "newest")
    shutil.copytree(backup, here, symlinks=True)
    shown = everywhere.seen()
    _produce_up_to(everywhere, 40)

    refused = failure_of(everywhere.env())
    assert isinstance(refused, AnotherTimelineError)
    held = {f"sink '{uid}'" for uid in SINKS} | {"the manifest", "source 'orders'"}
    assert refused.ahead.keys() == held
    assert all(before < one <= newest for one in refused.ahead.values())
    assert everywhere.seen() == shown
    assert everywhere.open_transactions() == []

    # Whoever has the newest directory puts it back, and nothing is lost or there twice.
    here.rename(everywhere.folder / "refused")
    (everywhere.folder / "newest").rename(here)
    _run_until_all_show(everywhere, 40)
    assert everywhere.seen() == dict.fromkeys(SINKS, expected_totals({"a": list(range(40))}))

    # Whoever has not, and says so, goes on from the older one: 10 to 39 are read again, and there twice.
    here.rename(everywhere.folder / "newest")
    (everywhere.folder / "refused").rename(here)
    JobDir(LocalStore(here)).order_timeline(0)
    client = run_until(everywhere.env(), lambda client: rows(client, "jdbc") >= 30)
    assert client.progress.last_error == ""
    totals = expected_totals({"a": list(range(40))})
    again = totals - expected_totals({"a": list(range(10))})
    assert everywhere.seen() == dict.fromkeys(SINKS, totals + again)


def _produce_up_to(everywhere: Everywhere, total: int) -> None:
    servers, topic = everywhere.broker.bootstrap_servers, everywhere.source
    produce(servers, topic, [order("a", n) for n in range(everywhere.produced, total)], key=b"a")
    everywhere.produced = total


def _run_until_all_show(everywhere: Everywhere, total: int) -> None:
    """Run the job with so many orders, of which some may be there already, until a checkpoint shows them."""
    if everywhere.produced < total:
        _produce_up_to(everywhere, total)
    run_until(everywhere.env(), lambda client: everywhere.in_database().total() >= total)
    assert everywhere.seen()["jdbc"].total() == total


def _has_data(folder: JobDir, checkpoint: CheckpointId) -> bool:
    decision = folder.decision(checkpoint)
    return decision is not None and any(batch.committables for batch in decision.batches)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "point",
    [
        (Step.SINK_COMMIT, "kafka"),
        (Step.SINK_COMMIT, "delta-2"),
        (Step.SINK_COMMIT, "files"),
    ],
)
def test_a_checkpoint_that_is_cut_off_between_two_sinks_is_finished_by_the_next_start(
    everywhere, point
) -> None:
    produce(
        everywhere.broker.bootstrap_servers, everywhere.source, [order("a", n) for n in range(20)], key=b"a"
    )
    env, steps = everywhere.env(), Steps(point)
    env.observe(steps)
    client = steps.client = env.execute_async()
    try:
        client.wait(200_000)
    finally:
        end(client)
    produce(
        everywhere.broker.bootstrap_servers,
        everywhere.source,
        [order("a", n) for n in range(20, 30)],
        key=b"a",
    )
    client = everywhere.env().execute_async()
    try:
        await_that(lambda: everywhere.in_database().total() >= 30, client, timeout_s=200)
        client.stop_with_checkpoint()
        assert client.wait(240_000)
    finally:
        end(client)
    assert everywhere.seen() == dict.fromkeys(SINKS, expected_totals({"a": list(range(30))}))
    assert everywhere.open_transactions() == []
    with KafkaAdmin(KafkaConnection(everywhere.broker.bootstrap_servers)) as admin:
        assert sum(admin.committed_offsets(f"g-{everywhere.sink}").values()) == 30
