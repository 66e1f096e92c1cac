"""A job directory with all that the REST server shows, written by the classes that jobs use; and a server."""

from __future__ import annotations

import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from flinkish_spark.checkpoint.answers import AnswerKind, CheckpointAnswer
from flinkish_spark.checkpoint.ownership import process_key
from flinkish_spark.core.config import CheckpointConfig, ExponentialDelay, UiConfig
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.reporting import collect_reported_settings
from flinkish_spark.job.requests import OutsideRequest, RequestKind
from flinkish_spark.protocol.checkpoint import ParticipantKind
from flinkish_spark.protocol.decisions import Decision, Receipt, Verdict
from flinkish_spark.protocol.event_time import ChannelStatus, Valve, ValveChannel
from flinkish_spark.protocol.failures import CheckpointFailureReason
from flinkish_spark.protocol.ids import BatchId, CheckpointId, CheckpointPurpose, Lineage, OwnerEpoch
from flinkish_spark.protocol.job_graph import (
    ChainingReason,
    JobEdge,
    JobGraph,
    JobOperator,
    OperatorKind,
    RunsIn,
    ShipStrategy,
)
from flinkish_spark.protocol.job_report import JobReport, ReportedWait
from flinkish_spark.protocol.job_status import (
    JobEvent,
    JobStatus,
    JobStatusChange,
    TaskState,
    TaskStateChange,
)
from flinkish_spark.protocol.plan_layout import OperatorInstance, PlanLayout, Scan, ScanRole
from flinkish_spark.protocol.records import Barrier, Committable, SinkAck, StagedBatch, TaskAck
from flinkish_spark.protocol.series import Series, SeriesPoint
from flinkish_spark.protocol.statistics import (
    CheckpointDurations,
    CheckpointStatistics,
    ParticipantStatistics,
    RestoredCheckpoint,
    StatisticsHistory,
)
from flinkish_spark.protocol.watermarks import AssignerTime, EventTime, OperatorTime
from flinkish_spark.rest.server import UiServer
from tests.support.cli_rig import JobOnDisk

TOKEN = "a token of the tests, only there"
INTERVAL_MS = 10_000
ORDERS, TOTALS, TABLE, TOPIC = "0a" * 16, "1b" * 16, "2c" * 16, "3d" * 16
GRAPH = JobGraph(
    "orders",
    (
        JobOperator(ORDERS, "orders", "orders", "KafkaSource", OperatorKind.SOURCE, RunsIn.JVM),
        JobOperator(
            TOTALS,
            "totals",
            "totals",
            "tumbling window",
            OperatorKind.STATEFUL,
            RunsIn.PYTHON,
            ("user",),
            4,
            128,
            inputs=(JobEdge(ORDERS, ShipStrategy.HASH, ChainingReason.BY_KEY),),
        ),
        JobOperator(
            TABLE,
            "table",
            "table",
            "DeltaSink",
            OperatorKind.SINK,
            RunsIn.JVM,
            inputs=(JobEdge(TOTALS, ShipStrategy.FORWARD, ChainingReason.EVALUATED),),
        ),
        JobOperator(
            TOPIC,
            "topic",
            "topic",
            "KafkaSink",
            OperatorKind.SINK,
            RunsIn.JVM,
            inputs=(JobEdge(TOTALS, ShipStrategy.FORWARD, ChainingReason.EVALUATED),),
        ),
    ),
)


class ShownJob(JobOnDisk):
    """A job with a source, windows and two sinks, by what it wrote; it seems to run in this process.

    Checkpoint n was triggered at `began_ms + n * INTERVAL_MS`, and read and wrote 1,000 records.
    """

    def __init__(self, root: Path, began_ms: int | None = None) -> None:
        super().__init__(root, owners=0)
        self.began_ms = int(time.time() * 1_000) - 300_000 if began_ms is None else began_ms
        self.history = StatisticsHistory()
        body = {"owner_epoch": 1, "host": "driver", "pid": os.getpid(), "taken_at_ms": self.began_ms}
        self.job_dir.create_owner(OwnerEpoch(1), {**body, "process": process_key(os.getpid())})
        self.job_dir.put_job_graph(GRAPH)
        layout = PlanLayout(
            (Scan(ScanRole.RECORDS, "orders", "totals"),), (OperatorInstance("totals", "totals"),)
        )
        self.job_dir.record_fact("layout-0", layout.to_json())
        settings = collect_reported_settings(
            CheckpointConfig(interval_ms=INTERVAL_MS), ExponentialDelay(), 0, 4, "http://127.0.0.1:4040"
        )
        self.report = JobReport.begin(OwnerEpoch(1), self.began_ms, GRAPH.vertices, settings, None)
        self.change(JobStatus.RUNNING, JobEvent.STARTED, 2_000)
        for vertex in GRAPH.vertices:
            self.vertex(vertex.id, TaskState.RUNNING, 3_000)

    def change(self, status: JobStatus, event: JobEvent, after_ms: int, cause: str = "") -> None:
        """Change the job's status so many milliseconds behind its begin."""
        at_ms = self.began_ms + after_ms
        self.report = self.report.apply(JobStatusChange(self.report.status, status, event, cause, at_ms))
        self.job_dir.put_report(self.report)

    def vertex(self, vertex: str, state: TaskState, after_ms: int, cause: str = "") -> None:
        """Change the state of one vertex."""
        at_ms = self.began_ms + after_ms
        change = TaskStateChange(vertex, "", 1, TaskState.CREATED, state, cause, at_ms)
        self.report = self.report.apply(change)
        self.job_dir.put_report(self.report)

    def held_back(self) -> None:
        """Wait for 100 s for a sink's commit that fails."""
        since_ms = int(time.time() * 1_000) - 100_000
        wait = ReportedWait("checkpoint 7", "its commit", since_ms, "no <b>route</b>")
        self.report = replace(self.report, waits=(wait,))
        self.job_dir.put_report(self.report)

    def failed_and_restarted(self, cause: str) -> None:
        """Fail in the windows, and run again."""
        self.vertex(TOTALS, TaskState.FAILED, 40_000, cause)
        self.change(JobStatus.FAILING, JobEvent.FAILURE, 40_000, cause)
        self.change(JobStatus.RESTARTING, JobEvent.RESTART, 40_500, cause)
        self.change(JobStatus.RUNNING, JobEvent.STARTED, 41_000)
        for vertex in GRAPH.vertices:
            self.vertex(vertex.id, TaskState.RUNNING, 42_000)

    def staged(self, number: int) -> StagedBatch:
        """Return what the micro-batch of a checkpoint staged: it took 4 s, and was held back for 1 s."""
        acks = tuple(
            SinkAck(
                uid, (TaskAck(0, 1_000, 7, (Barrier(CheckpointId(number), 0),)),), sync_ms=took, bytes=20_000
            )
            for uid, took in (("table", 3_000), ("topic", 900))
        )
        return StagedBatch(
            Lineage(0),
            BatchId(number),
            OwnerEpoch(1),
            1,
            acks,
            (
                Committable("table", {"file": "part"}),
                Committable("topic", {"id": f"transaction {number}", "secret": "in the payload"}),
            ),
            began_at_ms=self.at_ms(number) + 100,
            held_ms=1_000,
            staging_ms=4_000,
        )

    def at_ms(self, number: int) -> int:
        """Return when a checkpoint was triggered."""
        return self.began_ms + number * INTERVAL_MS

    def completed(self, number: int, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC) -> None:
        """Complete a checkpoint."""
        self.decided(number, purpose)
        receipt = Receipt(
            CheckpointId(number),
            OwnerEpoch(1),
            self.at_ms(number) + 5_400,
            {"table": ["COMMITTED"], "topic": ["COMMITTED"]},
            {"readers": {"orders": {"0": number * 1_000}}},
            {"table": {"version": number}},
        )
        self.job_dir.create_receipt(receipt)
        self.pin(number)
        self.measured(number, purpose)

    def decided(self, number: int, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC) -> None:
        """Decide a checkpoint, and confirm it nowhere."""
        self.job_dir.create_decision(
            Decision(
                CheckpointId(number),
                Verdict.COMMIT,
                OwnerEpoch(1),
                self.at_ms(number) + 5_000,
                batches=(self.staged(number),),
                offsets_text=f'v1\n{{"batchTimestampMs":0}}\n{{"orders":{{"0":{number * 1_000}}}}}',
                commits_text="v2\n{}",
                uids=("orders", "totals", "table", "topic"),
                purpose=purpose,
                triggered_at_ms=self.at_ms(number),
                times=self._times(number),
            )
        )

    def _times(self, number: int) -> EventTime:
        watermark_ms = self.at_ms(number) - 2_000
        assigner = AssignerTime(
            0, Valve({0: ValveChannel(watermark_ms, ChannelStatus.ACTIVE, True)}, watermark_ms), {0: 0}
        )
        valve = Valve({"orders": ValveChannel(watermark_ms, ChannelStatus.ACTIVE, True)}, watermark_ms)
        operators = {
            "totals": OperatorTime(frozenset({"orders"}), frozenset({"totals"}), valve, watermark_ms)
        }
        return EventTime({"orders": assigner}, valve, self.at_ms(number), watermark_ms, operators=operators)

    def measured(self, number: int, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC) -> None:
        """Note the statistics of a checkpoint that was completed."""
        begun = CheckpointStatistics.begin(CheckpointId(number), purpose, self.at_ms(number))
        sink, operator = ParticipantKind.SINK, ParticipantKind.OPERATOR
        participants = (
            ParticipantStatistics("totals", operator, ack_ms=4_100),
            ParticipantStatistics(
                "table",
                sink,
                ack_ms=4_200,
                rows=1_000,
                bytes=20_000,
                sync_ms=3_000,
                commit_ms=250,
                barriers=1,
            ),
            ParticipantStatistics(
                "topic", sink, ack_ms=4_200, rows=1_000, bytes=20_000, sync_ms=900, commit_ms=120, barriers=1
            ),
        )
        durations = CheckpointDurations(
            trigger_ms=100,
            alignment_ms=300,
            sync_ms=4_000,
            async_ms=600,
            commit_ms=400,
            end_to_end_ms=5_400 + number % 7 * 100,
        )
        done = begun.complete(durations, rows=2_000, bytes_staged=40_000, participants=participants)
        self.history = self.history.add_triggered(begun).add_ended(done)
        self.job_dir.put_statistics(self.history)

    def aborted(self, number: int, text: str) -> None:
        """Abort a checkpoint for which a sink has not acknowledged."""
        reason = CheckpointFailureReason.TASK_FAILED
        self.abort(number, f"{reason.value}: {text}")
        begun = CheckpointStatistics.begin(
            CheckpointId(number), CheckpointPurpose.PERIODIC, self.at_ms(number)
        )
        waited = (ParticipantStatistics("topic", ParticipantKind.SINK, is_acknowledged=False),)
        ended = begun.fail(reason, text, CheckpointDurations(trigger_ms=100, end_to_end_ms=2_000), waited)
        self.history = self.history.add_triggered(begun).add_ended(ended)
        self.job_dir.put_statistics(self.history)

    def measured_over_time(self, hours: int = 30, checkpoint_s: int = 15) -> None:
        """Store totals, and lines: more rows by day, a lag that rises, and a restart 20 minutes ago."""
        series, now_ms = Series(), int(time.time() * 1_000)
        for step in range(hours * 3_600 // checkpoint_s, 0, -1):
            ago_s = step * checkpoint_s
            at_ms, wave = now_ms - ago_s * 1_000, math.sin(ago_s / 7_000) + math.sin(ago_s / 90) / 6
            if 1_200 < ago_s < 1_380:
                continue
            if 1_200 - checkpoint_s < ago_s <= 1_200:
                series = series.add(SeriesPoint(at_ms, starts=1))
            rows = int((4_000 + 1_500 * wave) * checkpoint_s)
            lag = max(0, int(4_000 * wave)) + (40 * (ago_s - 600) if 600 < ago_s < 1_200 else 0)
            took_ms = int(6_000 + 2_500 * wave) + (9_000 if step % 29 == 0 else 0)
            point = SeriesPoint(at_ms, checkpoint_s * 1_000, rows, rows // 3, lag, lag * 2 // 3, took_ms)
            series = series.add(point)
        self.job_dir.put_series(series)
        source = {"numRecordsIn": 12_345_678, "pendingRecords": 2_100, "position": 99}
        late, sink = {"numLateRecordsDropped": 17}, {"numRecordsOut": 4_115_226, "numBytesOut": 9}
        totals = {"orders": source, "totals": late, "table": sink, "topic": sink}
        self.history = replace(self.history, totals=totals)
        self.job_dir.put_statistics(self.history)

    def restored(self, number: int) -> None:
        """Note that the job went on from a checkpoint."""
        restored = RestoredCheckpoint(CheckpointId(number), self.at_ms(number))
        self.history = self.history.add_restored(restored)
        self.job_dir.put_statistics(self.history)

    def carry_out(self, request: OutsideRequest) -> CheckpointAnswer:
        """Answer a request as a job does: a handler for `running`."""
        if request.purpose is None:
            self.change(JobStatus.CANCELLING, JobEvent.CANCEL, 200_000)
            self.change(JobStatus.CANCELED, JobEvent.ALL_ENDED, 200_100)
            return CheckpointAnswer(AnswerKind.COMPLETED)
        number = max((one.value for one in self.job_dir.list_checkpoint_ids()), default=0) + 1
        self.completed(number, request.purpose)
        if request.target:
            Path(request.target).mkdir(parents=True)
        if request.kind is RequestKind.STOP_WITH_SAVEPOINT:
            self.change(JobStatus.FINISHED, JobEvent.FINISH, 200_000)
        return CheckpointAnswer(AnswerKind.COMPLETED, CheckpointId(number))


def shown_job(root: Path, checkpoints: int = 6) -> ShownJob:
    """Return a job with a restart, complete checkpoints, an aborted one, and one that is not confirmed."""
    job = ShownJob(root)
    for number in range(1, checkpoints + 1):
        if number == 4:
            job.aborted(number, "no broker answered")
            job.failed_and_restarted("the sink 'topic' lost its broker. Why: no answer. To do: start it")
            job.restored(3)
        else:
            job.completed(number)
    job.decided(checkpoints + 1)
    job.job_dir.write_staged(job.staged(checkpoints + 2))
    return job


@contextmanager
def serving(*places: Path, **settings: Any) -> Iterator[UiServer]:
    """Serve jobs for the time of a block."""
    server = UiServer([StoreSpec(str(place)) for place in places], UiConfig(token=TOKEN, **settings))
    try:
        yield server
    finally:
        server.stop()


def asked(
    server: UiServer,
    path: str,
    body: Any = None,
    method: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """Return the status and the JSON of an answer; the token is brought unless `headers` are given."""
    given = {"Authorization": f"Bearer {TOKEN}"} if headers is None else dict(headers)
    data = None if body is None else json.dumps(body).encode()
    if data is not None:
        given.setdefault("Content-Type", "application/json")
    request = urllib.request.Request(server.url + path.lstrip("/"), data, given, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, json.loads(answer.read() or b"null")
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read() or b"null")
