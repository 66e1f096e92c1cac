"""Two-phase sinks without Spark: names, answers, sweeps, what a task does, what is refused before a start."""

from __future__ import annotations

import datetime
import decimal
import json
import threading
from collections.abc import Sequence
from types import SimpleNamespace

import pyarrow as pa
import pytest
from pyspark.sql import types as T

from flinkish_spark import CommitAnswer, OnBadRecord, Outcome, RefusedRecordError, TwoPhaseCommitSink
from flinkish_spark.checkpoint.failures import RepeatableUserError, classify
from flinkish_spark.connectors import row_count
from flinkish_spark.connectors.record_values import record_as_json, records_of, to_utc
from flinkish_spark.connectors.staged_ids import TransactionName
from flinkish_spark.connectors.two_phase import Refusals, StageTransaction, check_serialisable
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import (
    BadRecordError,
    ConfigError,
    CorruptObjectError,
    SchemaError,
    UnavailableError,
    UserFunctionError,
)
from flinkish_spark.protocol.ids import CheckpointId, JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import Committable, TaskAck
from tests.support.coordinator_rig import context_of
from tests.support.sinks import sink_context_of
from tests.support.two_phase_page import Ledger, example

JOB, EPOCH, CHECKPOINT = JobUuid("a" * 32), OwnerEpoch(3), CheckpointId(8)
SCHEMA = T.StructType().add("user", "string").add("total", "long")
MARK = TransactionName.mark_of("ledger")


def context(uid="ledger", epoch=EPOCH, schema=SCHEMA):
    return sink_context_of(JOB, epoch, uid, schema, CheckpointConfig())


def name(epoch=3, block=1, task=0, attempt=9, job=JOB, mark=MARK) -> str:
    return str(TransactionName(job, mark, OwnerEpoch(epoch), block, task, attempt))


class Notes(list):
    """What a test looks at: one for all copies of a sink."""

    def __deepcopy__(self, memo):
        return self


class Recording(TwoPhaseCommitSink):
    """Notes what it is told, answers what the test wants."""

    def __init__(self) -> None:
        self.calls: list[tuple] = Notes()
        self.answer: object = None
        self.open: dict = {}

    def _told(self, *call):
        self.calls.append(call)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def begin(self, transaction):
        self.calls.append(("begin", transaction.name, transaction.batch, transaction.fields))
        return [transaction.name]

    def write(self, handle, record):
        if record.total is None:
            raise RefusedRecordError("it has no total")
        handle.append(tuple(record))

    def flush(self, handle):
        return self._told("flush", *handle) or {"rows": len(handle) - 1}

    def discard(self, handle):
        self.calls.append(("discard", handle[0]))

    def commit(self, committable, checkpoint):
        return self._told("commit", committable, int(checkpoint))

    def abort(self, committable):
        return self._told("abort", committable)

    def recover_and_commit(self, committable, checkpoint):
        return self._told("recover_and_commit", committable, int(checkpoint))

    def recover_and_abort(self, committable):
        return self._told("recover_and_abort", committable)

    def list_open(self, prefix):
        self._told("list_open", prefix)
        return self.open


def committer_of(sink, **more):
    return sink.create_committer(None, context(**more))


def committable(stored="it", **parts) -> Committable:
    return Committable("ledger", {"transaction": name(**parts), "committable": stored})


# -- names ----------------------------------------------------------------------------------------------


def test_a_name_is_read_back_exactly_and_nothing_else_is_one() -> None:
    text = name(epoch=3, block=21, task=4, attempt=1_234_567_890_123)
    found = TransactionName.parse(text)
    assert found is not None and str(found) == text and len(text) <= 130
    assert (found.owner_epoch, found.block, found.task, found.attempt) == (EPOCH, 21, 4, 1_234_567_890_123)
    for wrong in (
        "",
        text + "-1",
        text[:-1] + "x",
        "x" + text,
        text.upper(),
        text + "\n",
        f"flinkish-{JOB}-1-2-3-4",
    ):
        assert TransactionName.parse(wrong) is None, wrong


def test_sinks_of_one_job_do_not_share_a_prefix() -> None:
    assert TransactionName.mark_of("a") != TransactionName.mark_of("a.dead-letters")


# -- answers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [
        (None, Outcome.COMMITTED),
        (Outcome.ALREADY_COMMITTED, Outcome.ALREADY_COMMITTED),
        (Outcome.LOST, Outcome.LOST),
        (CommitAnswer(Outcome.LOST, "gone", is_proven_aborted=True), Outcome.LOST),
        (ConnectionResetError("by peer"), Outcome.RETRY),
        (TimeoutError("too long"), Outcome.RETRY),
        (UnavailableError("away"), Outcome.RETRY),
    ],
)
def test_what_a_commit_answers(answer, outcome) -> None:
    sink = Recording()
    sink.answer = answer
    (given,) = committer_of(sink).commit(CHECKPOINT, [committable()])
    assert given.outcome is outcome
    if isinstance(answer, CommitAnswer):
        assert given == answer
    if outcome is Outcome.RETRY:
        assert str(answer).rstrip(".") in given.detail


@pytest.mark.parametrize("answer", [KeyError("total"), 7, True])
def test_anything_else_is_an_error_of_the_sink(answer) -> None:
    sink = Recording()
    sink.answer = answer
    with pytest.raises(RepeatableUserError, match=r"commit\(\) of the sink 'ledger'"):
        committer_of(sink).commit(CHECKPOINT, [committable()])


def test_commits_stop_at_the_first_that_is_not_done() -> None:
    class Stopping(Recording):
        def commit(self, stored, checkpoint):
            self.calls.append(stored)
            return Outcome.RETRY if stored == "b" else None

    sink = Stopping()
    answers = committer_of(sink).commit(CHECKPOINT, [committable(one) for one in "abc"])
    assert [a.outcome.name for a in answers] == ["COMMITTED", "RETRY"] and sink.calls == ["a", "b"]


def test_what_an_earlier_process_staged_is_recovered() -> None:
    sink = Recording()
    committer = committer_of(sink)
    committer.commit(CHECKPOINT, [committable("old", epoch=2), committable("new")])
    committer.abort([committable("old", epoch=2), committable("new")])
    assert [call[:2] for call in sink.calls] == [
        ("recover_and_commit", "old"),
        ("commit", "new"),
        ("recover_and_abort", "old"),
        ("abort", "new"),
    ]


def test_to_recover_is_the_same_call_unless_a_sink_says_otherwise() -> None:
    sink = SimpleNamespace(commit=lambda *given: ("commit", *given), abort=lambda *given: ("abort", *given))
    assert TwoPhaseCommitSink.recover_and_commit(sink, "it", CHECKPOINT) == ("commit", "it", CHECKPOINT)
    assert TwoPhaseCommitSink.recover_and_abort(sink, "it") == ("abort", "it")


def test_an_abort_of_what_is_gone_is_done() -> None:
    sink = Recording()
    sink.answer = CommitAnswer(Outcome.LOST, "no such thing")
    (answer,) = committer_of(sink).abort([committable()])
    assert answer.outcome is Outcome.ALREADY_COMMITTED and answer.detail == "no such thing"


def test_a_foreign_committable_is_refused() -> None:
    for payload in ({"path": "/lake"}, {"transaction": "mine", "committable": 1}, {"transaction": name()}):
        with pytest.raises(CorruptObjectError, match="not written by a two-phase sink"):
            committer_of(Recording()).commit(CHECKPOINT, [Committable("ledger", payload)])


def test_the_committing_side_has_a_copy_of_its_own() -> None:
    class Connecting(Recording):
        def commit(self, stored, checkpoint):
            self.connection = threading.Lock()

    sink = Connecting()
    committer_of(sink).commit(CHECKPOINT, [committable()])
    assert not hasattr(sink, "connection")


def test_what_it_caches_in_a_dict_does_not_travel_to_tasks() -> None:
    """A plain copy shares the dict that __init__ made: the next micro-batch would pickle a connection."""

    class Caching(Recording):
        def __init__(self) -> None:
            super().__init__()
            self.connections: dict = {}

        def commit(self, stored, checkpoint):
            self.connections["x"] = threading.Lock()

    sink = Caching()
    committer_of(sink).commit(CHECKPOINT, [committable()])
    assert sink.connections == {}
    check_serialisable(sink, "ledger")


def test_a_sink_of_which_a_part_cannot_be_copied_is_copied_all_the_same() -> None:
    sink = Recording()
    sink.json, sink.cache = json, {}
    copied = committer_of(sink)._sink
    assert copied.json is json and copied.cache is not sink.cache


@pytest.mark.parametrize("listed", [None, ["a"], 7, {1: "it"}])
def test_a_list_of_open_transactions_that_is_none_is_an_error_of_the_sink(listed) -> None:
    sink = Recording()
    sink.open = listed
    with pytest.raises(RepeatableUserError, match=r"list_open\(\) of the sink 'ledger' returned"):
        committer_of(sink).sweep([], frozenset)


@pytest.mark.parametrize("given", [[OSError], OSError, (OSError, "sqlite3.Error"), (BaseException,)])
def test_exceptions_that_cannot_be_caught_are_refused_before_a_start(given) -> None:
    """Else the first outage would be a TypeError that hides it."""
    sink = Recording()
    sink.retry_on = given
    if given is OSError:
        sink.preflight(None, context())
        return
    with pytest.raises(ConfigError, match="retry_on"):
        sink.preflight(None, context())


def test_a_close_that_fails_keeps_nobody_else_s_connection_open(caplog) -> None:
    """And the job that has ended well has ended well."""
    closed: list[str] = []

    class Stuck(Recording):
        def close(self):
            closed.append("stuck")
            raise ConnectionError("reset by peer")

    fine = SimpleNamespace(close=lambda: closed.append("fine"))
    parts = {"stuck": committer_of(Stuck()), "fine": fine}
    context_of(committers=parts, manifest=fine).close()
    assert closed == ["stuck", "fine", "fine"] and "closing 'stuck' failed" in caplog.text


async def _async(self, *given): ...


def _generator(self, *given):
    yield


@pytest.mark.parametrize("method", ["write", "write_batch", "commit", "close"])
@pytest.mark.parametrize("function", [_async, _generator])
def test_methods_that_nobody_would_run_are_refused_before_a_start(method, function) -> None:
    """A call only makes a coroutine: no record would be written, and nobody would hear of it."""
    sink = type("Async", (Recording,), {method: function})()
    with pytest.raises(ConfigError, match=rf"{method}\(\) of the class Async .*would never run.*function"):
        sink.preflight(None, context())


def test_it_says_which_task_a_committable_is_of_and_why_it_is_dead() -> None:
    class Doubting(Recording):
        def why_lost(self, stored):
            return "" if stored == "a" else "its file is gone"

    committer = committer_of(Doubting())
    assert committer.task_of(committable(task=6)) == 6
    dead = committer.why_dead([committable("a"), committable("b")])
    assert list(dead) == [1] and "its file is gone" in dead[1] and "ledger" in dead[1]


# -- sweeps ---------------------------------------------------------------------------------------------


def test_a_sweep_aborts_exactly_what_is_nobody_s() -> None:
    sink = Recording()
    leftover, old, kept, running = name(block=1), name(epoch=2), name(block=5), name(block=6)
    newer, foreign, other = name(epoch=4), name(job=JobUuid("b" * 32)), name(mark="0" * 8)
    listed = [leftover, old, kept, running, newer, foreign, other, f"flinkish-{JOB}-{MARK}-notes"]
    sink.open = {text: f"{text}.db" for text in listed}
    asked: list[str] = []

    def blocks():
        asked.append("blocks")
        assert sink.calls == [("list_open", f"flinkish-{JOB}-{MARK}-")], "listed first"
        return frozenset({6})

    still_wanted = [committable(block=5), Committable("other", {"path": "/lake"})]
    assert committer_of(sink).sweep(still_wanted, blocks) == 2
    assert sink.calls[1:] == [("abort", f"{leftover}.db"), ("recover_and_abort", f"{old}.db")] and asked


def test_a_sweep_that_meets_an_outage_goes_on_later() -> None:
    class Away(Recording):
        def abort(self, stored):
            raise OSError("no route")

    sink = Away()
    sink.open = {name(): "it"}
    assert committer_of(sink).sweep([], frozenset) == 0
    sink.answer = OSError("no route")
    with pytest.raises(UnavailableError, match=r"list_open\(\) of the sink 'ledger': OSError: no route"):
        committer_of(sink).sweep([], frozenset)


# -- in a task ------------------------------------------------------------------------------------------


def batch(*rows: Sequence, barriers: int = 0) -> pa.RecordBatch:
    control = [(0, 0, 0, 11 * n) for n in range(len(rows))] + [(1, 8, 5, 0)] * barriers
    full = [*rows, *[(None, None)] * barriers]
    names = ["_fs_kind", "_fs_checkpoint", "_fs_channel", "_fs_hash", "user", "total"]
    columns = [
        list(column) for column in zip(*[(*c, *r) for c, r in zip(control, full, strict=True)], strict=True)
    ]
    kinds = [pa.int32(), pa.int64(), pa.int64(), pa.int64(), pa.string(), pa.int64()]
    return pa.record_batch([pa.array(c, k) for c, k in zip(columns, kinds, strict=True)], names=names)


@pytest.fixture(autouse=True)
def in_a_task(monkeypatch):
    task = SimpleNamespace(partitionId=lambda: 2, attemptNumber=lambda: 0, taskAttemptId=lambda: 77)
    monkeypatch.setattr(row_count, "TaskContext", SimpleNamespace(get=lambda: task))
    monkeypatch.setattr(row_count, "freeze_modules", lambda: None)


def staged(sink, *batches, refusals=Refusals.FAIL):
    """Run a task; return its report and the other rows."""
    stage = StageTransaction(sink, str(JOB), "ledger", 3, 4, "0/12", refusals)
    rows = [row for out in stage(iter(batches)) for row in out.to_pylist()]
    return json.loads(rows[-1]["report"]), rows[:-1]


def test_a_task_begins_with_its_first_record_and_ends_with_a_flush() -> None:
    sink = Recording()
    empty = batch(barriers=1)
    report, rest = staged(sink, empty, batch(("a", 1), ("b", 2), barriers=1), batch(("c", 3)))
    own = name(epoch=3, block=4, task=2, attempt=77)
    assert sink.calls == [
        ("begin", own, "0/12", ("user", "total")),
        ("flush", own, ("a", 1), ("b", 2), ("c", 3)),
    ]
    assert report["committable"] == {"transaction": own, "committable": {"rows": 3}} and not rest
    ack = TaskAck.from_json(report)
    assert (ack.partition, ack.rows, ack.digest, len(ack.barriers)) == (2, 3, 11, 2)


def test_a_task_without_records_begins_nothing() -> None:
    sink = Recording()
    report, _ = staged(sink, batch(barriers=2))
    assert report["committable"] is None and len(report["barriers"]) == 2 and not sink.calls


def test_refused_records_are_counted_as_the_policy_says() -> None:
    rows = batch(("a", 1), ("b", None), ("c", 3))
    report, rest = staged(Recording(), rows, refusals=Refusals.DROP)
    assert (report["rows"], report["dropped"], report["dead_lettered"], rest) == (3, 1, 0, [])
    report, rest = staged(Recording(), rows, refusals=Refusals.KEEP)
    assert (report["rows"], report["dropped"], report["dead_lettered"]) == (3, 0, 1)
    assert rest == [{"report": None, "reason": "it has no total", "record": '{"user": "b", "total": null}'}]
    assert report["committable"]["committable"] == {"rows": 2}


def test_a_refused_record_fails_the_task_by_default_and_is_named_on_the_driver() -> None:
    sink = Recording()
    with pytest.raises(BadRecordError) as caught:
        staged(sink, batch(("b", None)))
    assert sink.calls[-1][0] == "discard"
    error = classify(Exception(f"Traceback\nflinkish_spark.errors.BadRecordError: {caught.value}"))
    assert isinstance(error, BadRecordError) and "the sink 'ledger' refuses it: it has no total" in str(error)


def test_an_error_in_a_task_discards_and_says_which_method_it_was() -> None:
    sink = Recording()
    sink.answer = ValueError("no room")
    with pytest.raises(RuntimeError) as caught:
        staged(sink, batch(("a", 1)))
    assert sink.calls[-1][0] == "discard"
    error = classify(caught.value)
    assert isinstance(error, UserFunctionError) and error.uid == "ledger"
    assert "flush() of the sink 'ledger' failed" in str(error) and "ValueError: no room" in str(error)


def test_an_outage_in_a_task_is_no_error_of_the_sink() -> None:
    sink = Recording()
    sink.answer = ConnectionError("no route")
    with pytest.raises(UnavailableError) as caught:
        staged(sink, batch(("a", 1)))
    text = f"Traceback\nflinkish_spark.core.errors.UnavailableError: {caught.value}"
    error = classify(Exception(text))
    assert error.restartable and not isinstance(error, UserFunctionError) and "no route" in str(error)


def test_an_input_that_fails_is_not_blamed_on_the_sink_and_a_failing_discard_hides_nothing() -> None:
    class Clumsy(Recording):
        def discard(self, handle):
            raise OSError("no route")

    def rows():
        yield batch(("a", 1))
        raise LookupError("from above")

    with pytest.raises(LookupError, match="from above"):
        list(StageTransaction(Clumsy(), str(JOB), "ledger", 3, 4, "0/12", Refusals.FAIL)(rows()))


def test_write_batch_refuses_rows_that_are_there() -> None:
    class Columns(Recording):
        def write_batch(self, handle, batch):
            return {batch.num_rows: "beyond the end"}

    with pytest.raises(RuntimeError, match=r"rows \[2\] of 2.*write_batch\(\) of the sink"):
        staged(Columns(), batch(("a", 1), ("b", 2)), refusals=Refusals.KEEP)


@pytest.mark.parametrize("wrong", [object(), {"a": {1, 2}}, float("nan"), {1: "a"}, b"raw", [(1, 2)]])
def test_a_committable_must_be_json(wrong) -> None:
    sink = Recording()
    sink.answer = wrong
    with pytest.raises(RuntimeError, match=r"flush\(\) of the sink 'ledger'"):
        staged(sink, batch(("a", 1)))


@pytest.mark.parametrize("fine", [{"file": "f", "rows": [1, 2.5, None]}, "text", 7, ["a"], ("a", 1)])
def test_any_json_value_is_a_committable(fine) -> None:
    sink = Recording()
    sink.answer = fine
    report, _ = staged(sink, batch(("a", 1)))
    assert report["committable"]["committable"] == json.loads(json.dumps(fine))


# -- records --------------------------------------------------------------------------------------------


def test_records_are_rows_in_utc_and_json_for_people() -> None:
    noon = datetime.datetime(2026, 3, 1, 12, tzinfo=datetime.UTC)
    columns = {
        "at": pa.array([noon], pa.timestamp("us", "Asia/Tokyo")),
        "price": pa.array([decimal.Decimal("1.10")], pa.decimal128(5, 2)),
        "tags": pa.array([[("k", noon)]], pa.map_(pa.string(), pa.timestamp("us", "Asia/Tokyo"))),
        "place": pa.array([{"x": float("inf"), "raw": b"\x00\xff"}]),
        "days": pa.array([[datetime.date(2026, 3, 1)]]),
        "odd name": pa.array([None], pa.string()),
    }
    (row,) = records_of(to_utc(pa.record_batch(list(columns.values()), names=list(columns))))
    assert row.at == noon and row.at.utcoffset() == datetime.timedelta(0) and row["odd name"] is None
    assert row.tags == {"k": noon} and row.tags["k"].utcoffset() == datetime.timedelta(0)
    assert row.place == {"x": float("inf"), "raw": b"\x00\xff"} and row[1] == decimal.Decimal("1.10")
    assert json.loads(record_as_json(row)) == {
        "at": "2026-03-01T12:00:00+00:00",
        "price": "1.10",
        "tags": {"k": "2026-03-01T12:00:00+00:00"},
        "place": {"x": "Infinity", "raw": "AP8="},
        "days": ["2026-03-01"],
        "odd name": None,
    }


# -- the page -------------------------------------------------------------------------------------------


def test_the_example_is_short_and_knows_its_own_proof(tmp_path) -> None:
    assert len(example().splitlines()) < 60
    ledger = Ledger(tmp_path)
    sink = ledger.sink()
    handle = sink.begin(SimpleNamespace(name="t"))
    sink.write(handle, SimpleNamespace(user="a", total=1))
    staged = sink.flush(handle)
    assert sink.list_open("t") == {"t": staged} and not ledger.rows()
    assert sink.commit(staged, CHECKPOINT) is None and ledger.rows() == [("a", 1)]
    sink.abort(staged)
    # The mark outlives the file; without both it was never visible.
    assert sink.commit(staged, CHECKPOINT) is Outcome.ALREADY_COMMITTED
    lost = sink.commit(staged + "x", CHECKPOINT)
    assert lost.outcome is Outcome.LOST and lost.is_proven_aborted and ledger.rows() == [("a", 1)]
    assert sink.list_open("t") == {} and ledger.files() == []


# -- before a start -------------------------------------------------------------------------------------


class Silent(Recording):
    write = TwoPhaseCommitSink.write


class Slotted(Recording):
    __slots__ = ("guard",)


def test_what_cannot_work_is_refused_before_a_start() -> None:
    with pytest.raises(ConfigError, match=r"writes no records.*define write"):
        Silent().preflight(None, context())
    sink = Recording()
    sink.on_refused = "drop"
    with pytest.raises(ConfigError, match=r"OnBadRecord\.DROP"):
        sink.preflight(None, context())
    sink.on_refused = OnBadRecord.DROP
    sink.preflight(None, context())
    with pytest.raises(SchemaError, match="two fields with the name 'a'"):
        sink.preflight(None, context(schema=T.StructType().add("a", "long").add("a", "long")))


@pytest.mark.parametrize("kind", [Recording, Slotted])
def test_what_cannot_travel_is_named(kind) -> None:
    sink = kind()
    sink.guard = threading.Lock()
    with pytest.raises(
        UserFunctionError, match=r"attribute 'guard' \(lock\).*in begin\(\) and commit\(\)"
    ) as caught:
        sink.preflight(None, context())
    assert caught.value.attribute == "guard"
