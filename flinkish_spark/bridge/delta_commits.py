"""Commits of a Delta sink: as files where Delta's transactions can be reached, else as rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyspark.sql import SparkSession

from flinkish_spark.bridge.delta import DeltaTables, NotAsFiles
from flinkish_spark.bridge.delta_errors import DeltaRefused
from flinkish_spark.bridge.delta_files import TableFiles, files_of
from flinkish_spark.bridge.delta_history import DeltaHistory
from flinkish_spark.bridge.delta_rows import DeltaRows
from flinkish_spark.bridge.delta_staged_rows import staged_files, stored_schema
from flinkish_spark.protocol.ids import CheckpointId
from flinkish_spark.protocol.timeline import Mark
from flinkish_spark.sinks.delta_folders import folder_of_sink
from flinkish_spark.sinks.delta_modes import (
    Append,
    OverwritePartitions,
    SchemaEvolution,
    Upsert,
    mode_from_json,
    stored_fields,
)
from flinkish_spark.sinks.delta_restore import checkpoint_note, mark_in
from flinkish_spark.sinks.delta_table import TableInfo, fit, why_stricter

#: How far back a commit is looked for when only its version is wanted.
_RECENT = 20


@dataclass(frozen=True, slots=True)
class CommitResult:
    """What became of a commit.

    Parameters
    ----------
    is_new
        Whether this call did it; otherwise the marker was there.
    version
        The table version that holds the checkpoint; None if that was not cheap to find out.
    """

    is_new: bool
    version: int | None


class DeltaCommits:
    """Ends what a Delta sink staged; one per process and sink, used by one thread at a time.

    Parameters
    ----------
    native
        Delta's transactions; None where they are out of reach, or not wanted.
    """

    def __init__(
        self, native: DeltaTables | None, rows: DeltaRows, files: TableFiles, history: DeltaHistory
    ) -> None:
        self._native, self._rows, self._files, self._history = native, rows, files, history
        #: By table, the checkpoint that this object has committed last: nobody else's.
        self._own: dict[str, int] = {}

    @classmethod
    def of(cls, spark: SparkSession, *, native: DeltaTables | None) -> DeltaCommits:
        """Return one for a session."""
        return cls(native, DeltaRows(spark), files_of(spark), DeltaHistory(spark))

    def info(self, path: str) -> TableInfo | None:
        """Return the table as it is now; None if there is none."""
        return self._rows.info(path) if self._native is None else self._native.info(path)

    def committed_version(self, path: str, app_id: str) -> int | None:
        """Return the last checkpoint that `app_id` committed; -1 if none, None if it cannot be known."""
        if self._native is not None:
            return self._native.committed_version(path, app_id)
        is_whole = False
        for row in self._history.commits(path):
            found = _mark_of(row, app_id)
            if found is not None:
                return int(found.checkpoint)
            is_whole = int(row["version"]) == 0
        # A history whose beginning was cleaned away may have had one.
        return -1 if is_whole or self._history.newest(path) < 0 else None

    def newest_mark(self, path: str, app_id: str) -> Mark | None:
        """Return which checkpoint `app_id` committed last; None if none, or if it cannot be known."""
        version = self.committed_version(path, app_id)
        return None if version is None or version < 0 else self._mark(path, app_id, version)

    def _mark(self, path: str, app_id: str, version: int) -> Mark:
        """Return the mark of a checkpoint; its token is known while the table's history has the commit."""
        found = self._commit_of(path, app_id, version)
        return (None if found is None else _mark_of(found, app_id)) or Mark(CheckpointId(version))

    def missing_files(self, staged: Mapping[str, Any]) -> list[str]:
        """Return staged files that are no longer there, or not as they were written."""
        return self._files.missing(staged_files(staged))

    def why_unfit(self, path: str, staged: Sequence[Mapping[str, Any]]) -> Mapping[int, str]:
        """Return why the table would refuse staged sets now, by their place; empty if it would take all."""
        table = self.info(path)
        if table is None:
            return {}
        reasons = {place: _why_unfit(table, one) for place, one in enumerate(staged)}
        return {place: reason for place, reason in reasons.items() if reason}

    def commit(
        self,
        path: str,
        staged: Sequence[Mapping[str, Any]],
        app_id: str,
        mark: Mark,
        require_ours: Callable[[Mark], None],
    ) -> CommitResult:
        """Commit several staged sets as one table version, unless `app_id` has committed it.

        Parameters
        ----------
        mark
            Of the checkpoint.
        require_ours
            Called with what `app_id` committed last, unless it was this object; what it raises passes, and
            nothing is committed.

        Raises
        ------
        DeltaConflict
            Repeat the call.
        DeltaRefused
            The table changed so that it does not take the rows.
        """
        note, version = checkpoint_note(app_id, mark), int(mark.checkpoint)

        def check(seen: int) -> None:
            if seen >= 0 and seen != self._own.get(path):
                require_ours(self._mark(path, app_id, seen))

        if self._native is not None and all(one.get("form") != "ROWS" for one in staged):
            try:
                done = self._native.commit(path, staged, app_id, version, note, check)
                if done is not None:
                    self._own[path] = version
                    return CommitResult(True, done)
                return CommitResult(False, self.version_of(path, app_id, version))
            except NotAsFiles:
                pass
        info = self.info(path)
        why = "" if info is None else _why_other_partitions(info, staged)
        if why:
            raise DeltaRefused(why)
        check(self.committed_version(path, app_id) or -1)
        # Delta does not say whether it skipped a write; whose note is in the history does.
        mine = f"{note} {secrets.token_hex(4)}"
        self._rows.commit(path, staged, app_id, version, mine, info)
        found = self._commit_of(path, app_id, version)
        if found is None:
            return CommitResult(False, None)
        is_new = found["userMetadata"] == mine
        if is_new:
            self._own[path] = version
        else:
            require_ours(self._mark(path, app_id, version))
        return CommitResult(is_new, int(found["version"]))

    def interrupt(self) -> None:
        """Let a commit of rows that another thread is in fail; one of files runs no long Spark job."""
        self._rows.interrupt()

    def version_of(self, path: str, app_id: str, version: int) -> int | None:
        """Return the table version of a checkpoint if it is a recent one."""
        found = self._commit_of(path, app_id, version)
        return None if found is None else int(found["version"])

    def _commit_of(self, path: str, app_id: str, version: int) -> Mapping[str, Any] | None:
        for row in self._recent(path):
            found = _mark_of(row, app_id)
            if found is not None and int(found.checkpoint) == version:
                return row
        return None

    def _recent(self, path: str) -> Iterator[Mapping[str, Any]]:
        read: list[int] = []
        if self._native is not None:
            for row in self._native.recent(path, _RECENT):
                yield row
                read.append(int(row["version"]))
        if len(read) < _RECENT and 0 not in read:
            yield from self._history.recent(path, _RECENT)[len(read) :]

    def leftovers(self, path: str, app_id: str) -> list[str]:
        """Return the names of the folders that hold rows of a sink."""
        return self._files.folders(folder_of_sink(path, app_id))

    def discard(self, path: str, app_id: str, name: str) -> None:
        """Delete one of them."""
        self._files.delete(f"{folder_of_sink(path, app_id)}/{name}")


def _why_unfit(table: TableInfo, staged: Mapping[str, Any]) -> str:
    mode = mode_from_json(staged.get("mode"))
    schema = stored_schema(staged)["fields"]
    names = stored_fields(mode, [str(f["name"]) for f in schema])
    stored = [f for f in schema if f["name"] in names]
    problems = fit(table, stored, SchemaEvolution(staged.get("schema_evolution", "NONE"))).problems
    if problems:
        return problems[0]
    if isinstance(mode, Upsert):
        missing = [key for key in mode.keys if not table.has_column(key)]
        if missing:
            return f"the table has no column {missing[0]}, which is a key"
    if table.is_append_only and not isinstance(mode, Append):
        return "the table became append-only"
    return _why_other_partitions(table, [staged]) or why_stricter(_rules(staged), table)


def _why_other_partitions(table: TableInfo, staged: Sequence[Mapping[str, Any]]) -> str:
    """Return why rows would replace others than they were staged for: in the end the whole table."""
    if not isinstance(mode_from_json(staged[0].get("mode")), OverwritePartitions):
        return ""
    if all(list(table.partition_by) == list(_partitions(one)) for one in staged):
        return ""
    return "the table's partitioning changed since the rows were staged"


def _mark_of(row: Mapping[str, Any], app_id: str) -> Mark | None:
    return mark_in(_parameters(row), str(row["userMetadata"] or ""), app_id)


def _parameters(row: Mapping[str, Any]) -> dict[str, str]:
    return {str(k): str(v) for k, v in (row["operationParameters"] or {}).items()}


def _partitions(staged: Mapping[str, Any]) -> Sequence[str]:
    if staged.get("form") == "ROWS":
        return [str(name) for name in staged["table_partitions"]]
    return TableInfo.from_log(staged["metadata"]).partition_by


def _rules(staged: Mapping[str, Any]) -> Mapping[str, Any]:
    if staged.get("form") == "ROWS":
        rules: Mapping[str, Any] = staged["rules"]
        return rules
    return TableInfo.from_log(staged["metadata"]).rules()
