"""Dead letters' committing side: two committers that answer as one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import pytest

from flinkish_spark import (
    BarrierRecords,
    DeltaSink,
    KafkaSink,
    OnBadRecord,
    Outcome,
    SinkGroup,
    SinkWithDeadLetters,
)
from flinkish_spark.connectors.dead_letters import mark_dead_letter
from flinkish_spark.connectors.delta.sink import require_tables_apart
from flinkish_spark.contracts.sink import Committer, CompletedCheckpoint, Sink
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, GraphError
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.job.preflight import _check_sink_uids
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import CommitAnswer, Committable
from tests.support.sinks import sink_context_of
from tests.unit.connectors.test_two_phase import SCHEMA, Recording

CHECKPOINT = CheckpointId(8)
COMPLETED = CompletedCheckpoint(CHECKPOINT, 1, CheckpointPurpose.PERIODIC)


@dataclass
class Scripted(Committer):
    """Answers as told, by payload; done otherwise."""

    script: dict[str, Outcome] = field(default_factory=dict)
    calls: list[tuple] = field(default_factory=list)

    def _answers(self, call, committables):
        self.calls.append((call, [(c.sink, c.payload) for c in committables]))
        answers = []
        for one in committables:
            answers.append(CommitAnswer(self.script.get(one.payload["id"], Outcome.COMMITTED)))
            if call == "commit" and not answers[-1].outcome.is_done:
                break
        return answers

    def commit(self, checkpoint, committables):
        return self._answers("commit", committables)

    def abort(self, committables):
        return self._answers("abort", committables)

    def why_dead(self, committables):
        return {i: "gone" for i, c in enumerate(committables) if self.script.get(c.payload["id"])}

    def sweep(self, kept, running_blocks):
        self.calls.append(("sweep", [(c.sink, dict(c.payload)) for c in kept]))
        return 1

    def checkpoint_complete(self, completed):
        outcome = self.script.get("complete", Outcome.ALREADY_COMMITTED)
        return CommitAnswer(outcome, facts={str(len(self.script)): 1})

    def why_not_superseded(self, target):
        return "no history" if "supersede" in self.script else ""


class Scripting(Sink):
    def __init__(self, committer) -> None:
        self.committer = committer

    def preflight(self, spark, context):
        self.context = context

    def create_writer(self, spark, context):
        raise NotImplementedError

    def create_committer(self, spark, context):
        self.context = context
        return self.committer


class Main(Recording):
    committer: Committer

    def create_committer(self, spark, context):
        return self.committer


def context(uid="ledger"):
    return sink_context_of(JobUuid("a" * 32), OwnerEpoch(1), uid, SCHEMA, CheckpointConfig())


@pytest.fixture
def both(tmp_path):
    """Makes a composite of two scripted committers, of a process of its own."""

    def make(main=None, dead=None):
        mine, theirs = Scripted(main or {}), Scripted(dead or {})
        sink = Main()
        sink.committer = mine
        mine_too = replace(context(), place=StoreSpec(str(tmp_path)))
        return SinkWithDeadLetters(sink, Scripting(theirs)).create_committer(None, mine_too), mine, theirs

    return make


def record(name) -> Committable:
    return Committable("ledger", {"id": name})


def letter(name, batch="") -> Committable:
    return Committable("ledger", mark_dead_letter({"id": name}, batch or f"0/{name[1]}"))


EPOCH = [record("m1"), letter("d1"), record("m2"), letter("d2")]


@pytest.mark.parametrize(
    ("main", "dead", "answers", "committed"),
    [
        ({}, {}, ["COMMITTED"] * 4, ["m1", "m2"]),
        ({"m1": Outcome.RETRY}, {}, ["RETRY"], ["m1", "m2"]),
        ({"m2": Outcome.LOST}, {}, ["COMMITTED", "COMMITTED", "LOST"], ["m1", "m2"]),
        # No record behind a dead letter that is lost or has to wait.
        ({}, {"d1": Outcome.LOST}, ["COMMITTED", "LOST"], ["m1"]),
        ({}, {"d2": Outcome.RETRY}, ["COMMITTED"] * 3 + ["RETRY"], ["m1", "m2"]),
        ({}, {"d1": Outcome.FENCED}, ["COMMITTED", "FENCED"], ["m1"]),
    ],
)
def test_answers_are_those_of_both_up_to_the_first_that_is_not_done(
    both, main, dead, answers, committed
) -> None:
    committer, mine, theirs = both(main, dead)
    assert [a.outcome.name for a in committer.commit(CHECKPOINT, EPOCH)] == answers
    # Each is asked once, for all that it has: some sinks commit a checkpoint as a whole.
    assert theirs.calls == [("commit", [("ledger.dead-letters", {"id": d}) for d in ("d1", "d2")])]
    assert mine.calls == [("commit", [("ledger", {"id": m}) for m in committed])]


def test_dead_letters_that_are_visible_stay_when_records_of_theirs_are_staged_again(both) -> None:
    """They are neither committed again nor aborted, also by another process; those behind are committed."""
    committer, _, theirs = both({"m2": Outcome.LOST})
    outcomes = [a.outcome.name for a in committer.commit(CHECKPOINT, EPOCH)]
    assert outcomes == ["COMMITTED", "COMMITTED", "LOST"] and len(theirs.calls) == 1
    committer, mine, theirs = both()
    assert [a.outcome.name for a in committer.abort(EPOCH[2:])] == ["COMMITTED", "ALREADY_COMMITTED"]
    assert [call for call, _ in mine.calls] == ["abort"] and not theirs.calls
    again = [*EPOCH[:2], record("m2-again"), letter("d2-again"), record("m3"), letter("d3")]
    for _ in range(2):
        assert all(a.outcome.is_done for a in committer.commit(CHECKPOINT, again))
    assert {call: [p["id"] for _, p in ids] for call, ids in theirs.calls} == {"commit": ["d3"]}
    # What was staged again is of nobody then: a replay that is given up aborts it.
    assert committer.abort([letter("d2-again")])[0].outcome is Outcome.COMMITTED
    assert theirs.calls[-1][0] == "abort"
    committer.checkpoint_complete(replace(COMPLETED, checkpoint=CheckpointId(9)))
    assert committer.abort([letter("d2")])[0].outcome is Outcome.COMMITTED, "confirmed"


def test_a_repetition_asks_for_all_dead_letters_again(both) -> None:
    """A sink that commits a checkpoint as a whole would not know a part of it; and its facts are wanted."""
    for _ in range(2):
        committer, _, theirs = both()
        assert all(a.outcome.is_done for a in committer.commit(CHECKPOINT, EPOCH))
        assert [[p["id"] for _, p in ids] for _, ids in theirs.calls] == [["d1", "d2"]]


def test_a_micro_batch_that_is_committed_in_part_is_told_apart_by_task(both) -> None:
    committer, mine, theirs = both()
    mine.task_of = theirs.task_of = lambda one: 3
    assert [committer.task_of(one) for one in (record("m1"), letter("d1"))] == [3, -4]
    theirs.task_of = lambda one: None
    assert committer.task_of(letter("d1")) is None


def test_nothing_is_asked_for_nothing(both) -> None:
    committer, mine, theirs = both()
    assert len(committer.commit(CHECKPOINT, [record("m1")])) == 1 and not theirs.calls
    assert len(committer.abort([letter("d1")])) == 1 and len(mine.calls) == 1
    assert committer.why_dead([]) == {} and committer.task_of(record("m1")) is None


def test_aborts_and_deaths_are_found_by_position(both) -> None:
    committer, _, _ = both({"m2": Outcome.RETRY}, {"d1": Outcome.FENCED})
    answers = [a.outcome.name for a in committer.abort(EPOCH)]
    # Dead letters were committed before records of their micro-batch were lost: they stay.
    assert answers == ["COMMITTED", "ALREADY_COMMITTED", "RETRY", "COMMITTED"]
    assert dict(committer.why_dead(EPOCH)) == {1: "gone", 2: "gone"}


def test_a_sweep_tells_both_what_is_kept_as_they_know_it(both) -> None:
    committer, mine, theirs = both()
    other = Committable("other", {"transactional_id": "x", "flinkish_part": "dead-letters"})
    assert committer.sweep([record("m1"), letter("d1"), other], frozenset) == 2
    wanted = [("ledger", {"id": "m1"}), ("ledger.dead-letters", {"id": "d1"}), ("other", dict(other.payload))]
    assert mine.calls == theirs.calls == [("sweep", wanted)]


def test_a_checkpoint_is_complete_when_both_say_so(both) -> None:
    committer, _, _ = both({"complete": Outcome.COMMITTED}, {})
    answer = committer.checkpoint_complete(COMPLETED)
    assert answer.outcome is Outcome.COMMITTED and answer.facts == {"0": 1, "1": 1}
    committer, _, _ = both({}, {"complete": Outcome.RETRY})
    assert committer.checkpoint_complete(COMPLETED).outcome is Outcome.RETRY
    assert both({"supersede": Outcome.LOST})[0].why_not_superseded(CHECKPOINT) == "no history"
    assert both()[0].why_not_superseded(CHECKPOINT) == ""


def test_the_other_sink_works_under_a_uid_and_a_folder_of_its_own() -> None:
    other = Scripting(Scripted())
    SinkWithDeadLetters(Recording(), other).preflight(None, context())
    assert other.context.uid == "ledger.dead-letters" and other.context.folder.name == "dead-letters"
    assert other.context.schema.names == ["uid", "reason", "record", "batch"]
    with pytest.raises(ConfigError, match="too long"):
        SinkWithDeadLetters(Recording(), other).preflight(None, context("u" * 120))


def test_what_cannot_be_combined_is_refused() -> None:
    topic = KafkaSink("host:9092", "refused", barriers=BarrierRecords.EACH_CHECKPOINT)
    with pytest.raises(ConfigError, match="barrier records"):
        SinkWithDeadLetters(Recording(), topic)
    with pytest.raises(
        ConfigError, match=r"^sink is .*\(DeltaSink\). It must be an instance of TwoPhaseCommitSink"
    ):
        SinkWithDeadLetters(DeltaSink("/lake/a"), DeltaSink("/lake/b"))
    with pytest.raises(ConfigError, match=r"^dead_letters is .*\(str\). It must be an instance of Sink"):
        SinkWithDeadLetters(Recording(), "/lake/b")
    with pytest.raises(ConfigError, match="has dead letters itself"):
        SinkWithDeadLetters(Recording(), SinkWithDeadLetters(Recording(), DeltaSink("/lake/b")))
    picky = Recording()
    picky.on_refused = OnBadRecord.DROP
    with pytest.raises(ConfigError, match="leave on_refused"):
        SinkWithDeadLetters(picky, Scripting(Scripted())).preflight(None, context())
    assert issubclass(EnvironmentFault, Exception)


def test_topics_and_the_jar_are_those_of_both() -> None:
    sink = SinkWithDeadLetters(Recording(), KafkaSink("host:9092", "refused"))
    assert sink.topics == ("refused",)
    assert [uid for uid, _ in sink.parts("ledger")] == ["ledger", "ledger.dead-letters"]


def planned(*sinks):
    return SimpleNamespace(sinks=[SimpleNamespace(uid=uid, sink=sink) for uid, sink in sinks])


def test_what_is_inside_a_sink_is_looked_at_before_a_start() -> None:
    """One table for two sinks, and a uid that the dead letters have."""
    inner = SinkWithDeadLetters(Recording(), DeltaSink("/lake/a"))
    with pytest.raises(GraphError, match=r"'ledger.dead-letters' and 'copy' write the same Delta table"):
        require_tables_apart([*inner.parts("ledger"), ("copy", DeltaSink("/lake/x/../a"))])
    with pytest.raises(GraphError, match=r"'ledger.dead-letters' and 'copy' write the same Delta table"):
        SinkGroup({"ledger": inner, "copy": DeltaSink("/lake/a")}, checkpoint_location="/data/c")
    with pytest.raises(ConfigError, match=r"'ledger.dead-letters' is used twice"):
        SinkGroup({"ledger": inner, "ledger.dead-letters": DeltaSink("/b")}, checkpoint_location="/data/c")
    with pytest.raises(GraphError, match=r"'one' and 'two' write the same Delta table"):
        require_tables_apart([("one", DeltaSink("s3://lake/a")), ("two", DeltaSink("s3a://lake/a/"))])
    require_tables_apart([*inner.parts("ledger"), ("copy", DeltaSink("/lake/b"))])
    nodes = planned(("ledger", inner), ("ledger.dead-letters", DeltaSink("/lake/b"))).sinks
    graph = SimpleNamespace(sinks=nodes, uids=lambda: tuple(node.uid for node in nodes))
    with pytest.raises(GraphError, match=r"'ledger.dead-letters' is used twice"):
        _check_sink_uids(graph, planned())


@pytest.mark.parametrize("main,dead,shorter", [(None, None, None), (None, 9, 9), (7, None, 7), (7, 9, 7)])
def test_staged_data_lives_as_long_as_the_shorter_lived_of_both(main, dead, shorter) -> None:
    """Otherwise nobody is warned of a transaction of dead letters that grows old."""
    mine, theirs = Scripted({}), Scripted({})
    mine.staged_lifetime_ms, theirs.staged_lifetime_ms = main, dead
    sink = Main()
    sink.committer = mine
    committer = SinkWithDeadLetters(sink, Scripting(theirs)).create_committer(None, context())
    assert committer.staged_lifetime_ms == shorter
