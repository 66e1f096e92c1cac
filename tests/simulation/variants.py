"""The product, broken on purpose: every variant must be caught.

A variant patches a module of the product the way somebody could have written it wrong. A patch that
finds nothing to replace fails, so variants cannot rot unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

from flinkish_spark.checkpoint import barriers as barrier_counter
from flinkish_spark.checkpoint import coordinator, decision_point, ownership
from flinkish_spark.checkpoint import retention as retiring
from flinkish_spark.checkpoint.commit import Confirmation
from flinkish_spark.checkpoint.completion import Completion
from flinkish_spark.checkpoint.decision_point import DecisionError
from flinkish_spark.checkpoint.hooks import MasterHooks
from flinkish_spark.checkpoint.ownership import Ownership
from flinkish_spark.checkpoint.spark_log import SparkLog
from flinkish_spark.checkpoint.transactional_ids import BlockPool
from flinkish_spark.connectors.kafka.writer import KafkaSinkCommittable
from flinkish_spark.core.errors import OwnedElsewhereError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import CreateResult
from flinkish_spark.job import supervisor
from flinkish_spark.job.inputs import Inputs
from flinkish_spark.job.recovery import Recovery
from flinkish_spark.job.rewind import Rewinder
from flinkish_spark.job.standby import LockWait
from flinkish_spark.protocol import checkpoint as checkpoints
from flinkish_spark.protocol import recovery
from flinkish_spark.protocol.decisions import Receipt, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId
from flinkish_spark.protocol.micro_batches import COMMITS
from flinkish_spark.protocol.records import Outcome
from flinkish_spark.protocol.retention import CheckpointPart, Deletion
from flinkish_spark.protocol.timeline import Mark, Timeline
from tests.simulation.bucket_variants import BUCKETS
from tests.simulation.patching import Patch, Variant
from tests.simulation.replay_variants import REPLAYS

# -- the eight of the issue ---------------------------------------------------------------------------


def _notify_before_persist() -> Sequence[Patch]:
    def complete(self: Any, decision: Any, on_decided: Callable[[], None]) -> Receipt:
        self._check_alive(decision)
        on_decided()
        receipt: Receipt = self._parts.confirm(decision)
        job = self._job
        decision_point.decide(decision, job.ownership, job.clock, job.observer, "let the job run on")
        self._clean_up(decision)
        return receipt

    return [mock.patch.object(Completion, "complete", complete)]


def _no_fencing() -> Sequence[Patch]:
    return [
        mock.patch.object(Ownership, "check", lambda self: None),
        mock.patch.object(ownership, "seal_open_ids", lambda owner, clock: ()),
    ]


def _blind_retry() -> Sequence[Patch]:
    def resolve(decision: Any, error: Exception, *others: Any) -> Any:
        raise DecisionError("the write failed, so it did not happen") from error

    return [mock.patch.object(decision_point, "resolve", resolve)]


def _delete_before_receipt() -> Sequence[Patch]:
    def complete(self: Any, decision: Any, on_decided: Callable[[], None]) -> Receipt:
        self._check_alive(decision)
        job = self._job
        decision_point.decide(decision, job.ownership, job.clock, job.observer, "let the job run on")
        on_decided()
        self._clean_up(decision)
        receipt: Receipt = self._parts.confirm(decision)
        return receipt

    return [mock.patch.object(Completion, "complete", complete)]


def _id_reuse_after_restart() -> Sequence[Patch]:
    def first_id(self: Any) -> CheckpointId:
        newest = self._job.job_dir.newest_commit()
        return CheckpointId(1) if newest is None else CheckpointId(int(newest.checkpoint) + 1)

    return [
        mock.patch.object(coordinator.CheckpointCoordinator, "_first_id", first_id),
        # Without its record the second use would be refused.
        mock.patch.object(JobDir, "create_trigger", lambda self, record: CreateResult.CREATED),
    ]


def _ack_counted_twice() -> Sequence[Patch]:
    def count(checkpoint: CheckpointId, acks: Sequence[Any], expected: Mapping[str, Any]) -> str:
        by_sink = {ack.sink: ack for ack in acks}
        for sink, channels in expected.items():
            seen = [b for b in by_sink[sink].barriers if b.checkpoint == checkpoint]
            if len(seen) < len(channels):
                return f"sink '{sink}' showed {len(seen)} barriers"
        return ""

    return [mock.patch.object(barrier_counter, "find_misalignment", count)]


def _committables_dropped_on_abort() -> Sequence[Patch]:
    original = coordinator.CheckpointCoordinator._abort

    def abort(self: Any, effect: Any) -> None:
        self._undecided = tuple(s for s in self._undecided if effect.checkpoint not in s.checkpoints)
        original(self, effect)

    return [mock.patch.object(coordinator.CheckpointCoordinator, "_abort", abort)]


def _commits_removed_before_the_intent() -> Sequence[Patch]:
    original = Rewinder.open

    def open_late(self: Any, kind: Any, first_removed: BatchId, *args: Any) -> None:
        for entry in sorted(self._entries_from(first_removed)):
            if entry.startswith(COMMITS):
                self.log.remove(entry)
        original(self, kind, first_removed, *args)

    return [mock.patch.object(Rewinder, "open", open_late)]


# -- more ---------------------------------------------------------------------------------------------


def _decided_before_spark_commits() -> Sequence[Patch]:
    original = SparkLog.read

    def read(self: Any, log: str, batch: BatchId) -> str | None:
        text = original(self, log, batch)
        return 'v1\n{"stateUniqueIds": "unknown"}' if text is None and log == COMMITS else text

    return [mock.patch.object(SparkLog, "read", read)]


def _no_look_before_the_decision() -> Sequence[Patch]:
    return [mock.patch.object(Completion, "_check_alive", lambda self, decision: None)]


def _receipt_first() -> Sequence[Patch]:
    original = Confirmation.confirm

    def confirm(self: Any, decision: Any) -> Receipt:
        receipt = Receipt(decision.checkpoint, self._ownership.epoch, self._clock.wall_ms())
        self._job_dir.create_receipt(receipt)
        return original(self, decision)

    return [mock.patch.object(Confirmation, "confirm", confirm)]


def _no_receipt() -> Sequence[Patch]:
    return [mock.patch.object(JobDir, "create_receipt", lambda self, receipt: None)]


def _group_offsets_first() -> Sequence[Patch]:
    original = Confirmation.confirm

    def confirm(self: Any, decision: Any) -> Receipt:
        self._commit_group_offsets(decision)
        return original(self, decision)

    return [mock.patch.object(Confirmation, "confirm", confirm)]


def _retry_taken_for_done() -> Sequence[Patch]:
    done = (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED, Outcome.RETRY)
    return [mock.patch.object(Outcome, "is_done", property(lambda self: self in done))]


def _recovery_believes_that_all_is_alive() -> Sequence[Patch]:
    return [mock.patch.object(Recovery, "_why_dead", lambda self, staged: "")]


def _recovery_forgets_receipts() -> Sequence[Patch]:
    rules = tuple(rule for rule in recovery.RULES if rule.applies is not recovery._confirm)
    assert len(rules) == len(recovery.RULES) - 1
    return [mock.patch.object(recovery, "RULES", rules)]


def _recovery_leaves_the_cut_off() -> Sequence[Patch]:
    rules = tuple(rule for rule in recovery.RULES if rule.applies is not recovery._abort_cut_off)
    assert len(rules) == len(recovery.RULES) - 1
    return [mock.patch.object(recovery, "RULES", rules)]


def _sweep_forgets_what_is_kept() -> Sequence[Patch]:
    def sweep(self: Any, *found: Any) -> None:
        for committer in self._committers.values():
            committer.sweep((), frozenset)

    return [mock.patch.object(Recovery, "_sweep", sweep)]


def _sweep_forgets_what_runs() -> Sequence[Patch]:
    return [mock.patch.object(BlockPool, "leased", property(lambda self: frozenset()))]


def _blocks_used_again_after_a_restart() -> Sequence[Patch]:
    def forget(self: Any) -> None:
        self._free.extend(self._leased)
        self._leased.clear()

    return [mock.patch.object(BlockPool, "forget", forget)]


def _no_seal_at_a_takeover() -> Sequence[Patch]:
    return [mock.patch.object(ownership, "seal_open_ids", lambda owner, clock: ())]


def _decided_checkpoints_expire() -> Sequence[Patch]:
    state, event = checkpoints.CheckpointState, checkpoints.CheckpointEvent
    table = dict(checkpoints.TRANSITIONS)
    for late in (state.DECIDING, state.DECIDED):
        table[late] = {**table[late], event.EXPIRED: state.ABORTED}
    return [mock.patch.object(checkpoints, "TRANSITIONS", table)]


def _newest_not_retained() -> Sequence[Patch]:
    def find_deletions(facts: Any) -> tuple[Deletion, ...]:
        return tuple(
            Deletion(fact.checkpoint, tuple(CheckpointPart)) for fact in facts.checkpoints if fact.has_receipt
        )

    return [mock.patch.object(retiring, "find_deletions", find_deletions)]


def _hook_states_forgotten() -> Sequence[Patch]:
    original = MasterHooks.trigger

    def trigger(self: Any, checkpoint: CheckpointId) -> dict[Any, Any]:
        return dict.fromkeys(original(self, checkpoint))

    return [mock.patch.object(MasterHooks, "trigger", trigger)]


def _barriers_not_counted() -> Sequence[Patch]:
    return [mock.patch.object(barrier_counter, "find_misalignment", lambda *args: "")]


def _zombies_recover_unchecked() -> Sequence[Patch]:
    def abort_sink(self: Any, sink: str, committables: Sequence[Any]) -> None:
        while not all(a.outcome.is_done for a in self._committers[sink].abort(committables)):
            self._wait("aborting", "")

    original = Recovery._do

    def do(self: Any, *args: Any) -> None:
        with mock.patch.object(Ownership, "check", lambda owner: None):
            original(self, *args)

    return [
        mock.patch.object(Recovery, "_abort_sink", abort_sink),
        mock.patch.object(Recovery, "_do", do),
    ]


def _barrier_records_of_any_checkpoint() -> Sequence[Patch]:
    return [mock.patch.object(KafkaSinkCommittable, "belongs_to", lambda self, checkpoint: True)]


def _every_mark_is_ours() -> Sequence[Patch]:
    return [mock.patch.object(Timeline, "why_not_ours", lambda self, mark, upto: "")]


def _marks_without_tokens() -> Sequence[Patch]:
    """Ids alone: what an older directory lacks is seen; what a copy has committed under its id is not."""
    original = Timeline.why_not_ours
    return [
        mock.patch.object(
            Timeline, "why_not_ours", lambda self, mark, upto: original(self, Mark(mark.checkpoint), upto)
        )
    ]


def _what_was_given_up_counts_as_ours() -> Sequence[Patch]:
    """What the original commits of a checkpoint that was open when the directory was copied."""
    return [mock.patch.object(Timeline, "has_given_up", lambda self, checkpoint: False)]


def _what_an_owner_gave_up_itself_is_listed() -> Sequence[Patch]:
    """An atomic sink has left its mark beside the input's position, and the next checkpoint shows it."""

    def is_given_up(job_dir: JobDir, checkpoint: CheckpointId, stretches: Any) -> bool:
        decision = job_dir.first_decision(checkpoint)
        return decision is not None and decision.verdict is Verdict.ABORT

    return [mock.patch.object(ownership, "_was_given_up_for_another", is_given_up)]


def _input_not_looked_at_before_a_rewind() -> Sequence[Patch]:
    return [mock.patch.object(Inputs, "why_lost", lambda self, position: "")]


def _standbys_take_over_whatever_they_are_told() -> Sequence[Patch]:
    def wait_for_lock(lock: Any, settings: Any, end_wanted: Any) -> LockWait:
        while True:
            try:
                lock.acquire()
                return LockWait.TAKEN
            except OwnedElsewhereError:
                settings.clock.sleep_ms(settings.standby_poll_ms)

    return [mock.patch.object(supervisor, "wait_for_lock", wait_for_lock)]


def _lost_taken_for_done() -> Sequence[Patch]:
    """As Flink does: "potentially lost data", logged and dropped."""
    done = (Outcome.COMMITTED, Outcome.ALREADY_COMMITTED, Outcome.LOST)
    return [
        *_no_look_before_the_decision(),
        mock.patch.object(Outcome, "is_done", property(lambda self: self in done)),
        mock.patch.object(Confirmation, "_refuse_final", lambda self, *args: None),
    ]


#: The eight that issue 5 names, then those of our own choice.
REQUIRED = (
    Variant("notify before persist", _notify_before_persist),
    Variant("no fencing", _no_fencing),
    Variant("blind retry", _blind_retry),
    Variant("delete before receipt", _delete_before_receipt),
    Variant("id reuse after restart", _id_reuse_after_restart),
    Variant("ack counted twice", _ack_counted_twice),
    Variant("committables dropped on abort", _committables_dropped_on_abort),
    Variant("commits/ removed before the rewind intent", _commits_removed_before_the_intent),
)
MORE = (
    Variant("decided before Spark commits", _decided_before_spark_commits),
    Variant("no look before the decision", _no_look_before_the_decision),
    Variant("lost taken for done", _lost_taken_for_done),
    Variant("retry taken for done", _retry_taken_for_done),
    Variant("receipt first", _receipt_first),
    Variant("no receipt", _no_receipt),
    Variant("group offsets first", _group_offsets_first),
    Variant("recovery believes that all is alive", _recovery_believes_that_all_is_alive),
    Variant("recovery forgets receipts", _recovery_forgets_receipts),
    Variant("recovery leaves the cut-off micro-batch", _recovery_leaves_the_cut_off),
    Variant("sweep forgets what is kept", _sweep_forgets_what_is_kept),
    Variant("sweep forgets what runs", _sweep_forgets_what_runs),
    Variant("blocks used again after a restart", _blocks_used_again_after_a_restart),
    Variant("no seal at a takeover", _no_seal_at_a_takeover),
    Variant("zombies recover unchecked", _zombies_recover_unchecked),
    Variant("decided checkpoints expire", _decided_checkpoints_expire),
    Variant("newest not retained", _newest_not_retained),
    Variant("hook states forgotten", _hook_states_forgotten),
    Variant("barriers not counted", _barriers_not_counted),
    Variant("barrier records of any checkpoint", _barrier_records_of_any_checkpoint),
    Variant("every mark is ours", _every_mark_is_ours),
    Variant("marks without tokens", _marks_without_tokens),
    Variant("what was given up counts as ours", _what_was_given_up_counts_as_ours),
    Variant("what an owner gave up itself is listed", _what_an_owner_gave_up_itself_is_listed),
    Variant("input not looked at before a rewind", _input_not_looked_at_before_a_rewind),
    Variant("standbys take over whatever they are told", _standbys_take_over_whatever_they_are_told),
)
VARIANTS = (*REQUIRED, *MORE, *REPLAYS, *BUCKETS)
