"""The committing half of a Delta sink: one table version per checkpoint, and the way back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flinkish_spark.bridge.delta_commits import DeltaCommits
from flinkish_spark.bridge.delta_errors import DeltaConflict, DeltaRefused
from flinkish_spark.bridge.delta_history import DeltaHistory
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.protocol.records import Committable
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.sinks.base import Committer, ShownOrder, SinkContext
from flinkish_spark.sinks.delta_folders import StagedFolder
from flinkish_spark.sinks.delta_modes import mode_from_json
from flinkish_spark.sinks.delta_restore import (
    DeleteRows,
    NoRestore,
    NothingToRestore,
    RestorePlan,
    RestoreVersion,
    TableCommit,
    app_id,
    note_of,
    plan_restore,
)
from flinkish_spark.sinks.delta_sink_settings import DeltaSinkSettings


class DeltaCommitter(Committer):
    """Commits, forgets and restores; see `Committer`.

    Parameters
    ----------
    commits
        How the table is reached.
    """

    shown_order = ShownOrder.OF_COMMITS

    def __init__(
        self, sink: DeltaSinkSettings, commits: DeltaCommits, history: DeltaHistory, context: SinkContext
    ) -> None:
        self._sink, self._commits, self._history, self._context = sink, commits, history, context
        self._app_id = app_id(context.job, context.uid)

    def commit(self, checkpoint: CheckpointId, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Commit all as one table version with the checkpoint's id."""
        if not committables:
            return ()
        path = str(committables[0].payload["path"])
        staged: list[Mapping[str, Any]] = [c.payload for c in committables]
        answer = self._commit(path, staged, checkpoint)
        return tuple(answer for _ in committables)

    def newest_marks(self) -> Sequence[Mark]:
        """Ask the table."""
        mark = self._commits.newest_mark(self._sink.path, self._app_id)
        return () if mark is None else (mark,)

    def _require_ours(self, checkpoint: CheckpointId) -> Callable[[Mark], None]:
        return lambda mark: self._context.require_ours(mark, checkpoint)

    def _commit(self, path: str, staged: list[Mapping[str, Any]], checkpoint: CheckpointId) -> CommitAnswer:
        version, timeline = int(checkpoint), self._context.timeline
        missing = [m for s in staged for m in self._commits.missing_files(s)]
        if missing:
            why = f"{len(missing)} staged files are gone from {path} or damaged, first {missing[0]}"
            return self._lost_unless_committed(path, staged, version, why)
        try:
            done = self._commits.commit(
                path, staged, self._app_id, timeline.mark_of(checkpoint), self._require_ours(checkpoint)
            )
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaRefused as error:
            why = f"the table {path} no longer takes the rows: {error}"
            # Staging again finds these reasons and names them. Any other it does not find: its replay would
            # be lost in turn, for ever. The table may take the rows when it was seen to.
            explained = bool(self._commits.why_unfit(path, staged))
            return self._lost_unless_committed(path, staged, version, why, is_final=explained)
        outcome = Outcome.COMMITTED if done.is_new else Outcome.ALREADY_COMMITTED
        return CommitAnswer(outcome, facts=_facts(staged, done.version))

    def _lost_unless_committed(
        self, path: str, staged: list[Mapping[str, Any]], version: int, why: str, *, is_final: bool = True
    ) -> CommitAnswer:
        """Answer LOST, proven if the marker says that this checkpoint is not in the table.

        Asked behind the files: whoever could still commit them would have to find them all, and writes the
        same marker as a replay, so that only one of the two becomes visible.
        """
        seen = self._commits.committed_version(path, self._app_id)
        if seen is not None and seen >= version:
            mark = self._commits.newest_mark(path, self._app_id)
            if mark is not None:
                self._context.require_ours(mark, CheckpointId(version))
            known = self._commits.version_of(path, self._app_id, version)
            return CommitAnswer(Outcome.ALREADY_COMMITTED, facts=_facts(staged, known))
        return CommitAnswer(Outcome.LOST, why, is_proven_aborted=is_final and seen is not None)

    def interrupt(self) -> None:
        """End the Spark jobs of a commit of rows: a MERGE may take an hour."""
        self._commits.interrupt()

    def abort(self, committables: Sequence[Committable]) -> Sequence[CommitAnswer]:
        """Forget the files: they are in no log, and VACUUM or a sweep removes them later.

        Not deleted here, because a decision may be unknown to a fenced process.
        """
        return tuple(CommitAnswer(Outcome.COMMITTED, "left to VACUUM") for _ in committables)

    def why_dead(self, committables: Sequence[Committable]) -> Mapping[int, str]:
        """Find committables whose files are gone, that do not fit the table or the sink any more."""
        dead: dict[int, str] = {}
        for index, committable in enumerate(committables):
            reason = self._why_other(committable.payload)
            if not reason:
                missing = self._commits.missing_files(committable.payload)
                reason = f"the staged file {missing[0]} is gone or damaged" if missing else ""
            if reason:
                dead[index] = reason
        alive = [index for index in range(len(committables)) if index not in dead]
        if alive:
            unfit = self._commits.why_unfit(self._sink.path, [committables[i].payload for i in alive])
            dead.update({alive[place]: reason for place, reason in unfit.items()})
        return {index: f"sink '{self._context.uid}': {reason}" for index, reason in dead.items()}

    def _why_other(self, payload: Mapping[str, Any]) -> str:
        """Return how a committable differs from the sink now: one commit has one table and one mode."""
        if payload["path"] != self._sink.path:
            return f"the rows were staged for the table {payload['path']}"
        if mode_from_json(payload.get("mode")) != self._sink.mode:
            return "the rows were staged under another mode"
        return ""

    def sweep(self, kept: Sequence[Committable], running_blocks: Callable[[], frozenset[int]]) -> int:
        """Delete folders of staged rows that nobody will commit. Data files are left to VACUUM."""
        path, deleted = self._sink.path, 0
        names = {str(c.payload.get("folder", "")).rpartition("/")[2] for c in kept}
        found = self._commits.leftovers(path, self._app_id)
        # This order matters: a block that is leased after the listing has no folder in it.
        leased = running_blocks()
        for name in found:
            folder = StagedFolder.parse(name)
            if folder is None or name in names:
                continue
            mine = folder.owner_epoch == int(self._context.owner_epoch)
            if folder.owner_epoch > int(self._context.owner_epoch) or (mine and folder.block in leased):
                continue
            self._commits.discard(path, self._app_id, name)
            deleted += 1
        return deleted

    def why_not_superseded(self, target: CheckpointId) -> str:
        """Ask the table's history who committed since then, and the file system what is left."""
        # No rewind has started this lineage, so no note can be found.
        plan = self._plan(target, Lineage(0))
        why = plan.why if isinstance(plan, NoRestore) else ""
        if isinstance(plan, RestoreVersion):
            missing = self._history.missing_at(self._sink.path, plan.version)
            why = f"the file {missing[0]} of version {plan.version} is gone" if missing else ""
        if not why and isinstance(plan, RestoreVersion | DeleteRows):
            table = self._commits.info(self._sink.path)
            why = "it is append-only" if table is not None and table.is_append_only else ""
        return why and f"the table {self._sink.path} of sink '{self._context.uid}' cannot be restored: {why}"

    def supersede(self, target: CheckpointId, lineage: Lineage) -> CommitAnswer:
        """Restore the table to what `target` left, once per lineage."""
        path, note = self._sink.path, note_of(self._context.job, lineage)
        plan = self._plan(target, lineage)
        try:
            match plan:
                case NothingToRestore():
                    return CommitAnswer(Outcome.ALREADY_COMMITTED)
                case NoRestore(why):
                    return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {why}")
                case DeleteRows():
                    self._history.delete_rows(path, note)
                case RestoreVersion(version):
                    self._history.restore(path, version, note)
        except DeltaConflict as error:
            return CommitAnswer(Outcome.RETRY, str(error))
        except DeltaRefused as error:
            return CommitAnswer(Outcome.LOST, f"the table {path} cannot be restored: {error}")
        return CommitAnswer(Outcome.COMMITTED)

    def _plan(self, target: CheckpointId, lineage: Lineage) -> RestorePlan:
        commits = (
            TableCommit(
                int(row["version"]),
                str(row["operation"]),
                {str(k): str(v) for k, v in (row["operationParameters"] or {}).items()},
                str(row["userMetadata"] or ""),
            )
            for row in self._history.commits(self._sink.path)
        )
        return plan_restore(commits, self._context.job, target, lineage)


def _facts(staged: Sequence[Mapping[str, Any]], version: int | None) -> dict[str, Any]:
    """Return what a receipt says about a commit: table version, rows and files that were staged."""
    facts: dict[str, Any] = {} if version is None else {"version": version}
    if all("rows" in one for one in staged):
        facts["rows"] = sum(int(one["rows"]) for one in staged)
    facts["files"] = sum(
        len(one["files"]) if "files" in one else sum("add" in action for action in one["actions"])
        for one in staged
    )
    return facts
