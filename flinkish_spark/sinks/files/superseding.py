"""Taking back what was committed after a checkpoint: finished files say in their names what they hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from flinkish_spark.protocol.outcomes import CommitAnswer, Outcome
from flinkish_spark.sinks.files.buckets import BucketAssigner
from flinkish_spark.sinks.files.disk import Disk
from flinkish_spark.sinks.files.ledger import Entry, Ledger, OpenPartition, State
from flinkish_spark.sinks.files.names import HIDDEN, PartName, SinkFiles, bucket_of
from flinkish_spark.sinks.files.partitions import PartitionCommit, PartitionTime, SuccessFile


class SupersedeSettings(Protocol):
    """What a rewind has to know of the sink's settings."""

    @property
    def partition_commit(self) -> PartitionCommit | None:
        """How partitions are committed."""

    @property
    def assigners(self) -> tuple[BucketAssigner, ...]:
        """The sink's buckets."""


@dataclass(frozen=True)
class Superseder:
    """Deletes the finished files of superseded checkpoints. Files of others are not looked at."""

    files: SinkFiles
    ledger: Ledger
    disk: Disk
    settings: SupersedeSettings

    def why_not(self, target: int) -> str:
        """Return why the target's files cannot be brought back; empty if they can."""
        for path, part in self._finished():
            if part.first <= target < part.last:
                return (
                    f"the file {path} of sink '{self.files.uid}' holds records from before and after "
                    f"checkpoint {target}, because parts were rolled over checkpoints"
                )
        return ""

    def supersede(self, target: int) -> CommitAnswer:
        """Delete and forget what came after the target; may be repeated."""
        why = self.why_not(target)
        if why:
            return CommitAnswer(Outcome.LOST, why)
        finished = list(self._finished())
        doomed = [path for path, part in finished if part.first > target]
        touched = sorted({path.parent for path in doomed})
        # This order matters: with the records gone first, a crash in between leaves files whose names say
        # that they have to go, and no record that would finish others.
        self._set_back(target, touched, [path for path, part in finished if part.last <= target])
        for folder in touched:
            for name in self._success_names():
                self.disk.remove(folder / name)
        for path in doomed:
            self.disk.remove(path)
        self.disk.sync_folders(touched)
        return CommitAnswer(Outcome.COMMITTED if doomed else Outcome.ALREADY_COMMITTED)

    def _set_back(self, target: int, touched: list[Path], left: list[Path]) -> None:
        """Write the state as of the target under the newest number, then drop all later records."""
        checkpoints = self.ledger.checkpoints()
        if not checkpoints:
            return
        newest = checkpoints[-1]
        state = self.ledger.state_before(newest + 1)
        # A checkpoint that was not completed has committed chunks that no state contains.
        unseen = tuple(c for c in self.ledger.unseen(newest) if c not in state.open)
        kept = tuple(chunk for chunk in (*state.open, *unseen) if chunk.checkpoint <= target)
        waiting = {(p.root, p.bucket): p for p in state.partitions}
        for folder in touched:
            at = (str(self.files.root), bucket_of(str(folder.relative_to(self.files.root) / "file")))
            if at[1]:
                waiting.setdefault(at, OpenPartition(*at, 0))
        seen_ms = self._seen_ms(left)
        self.ledger.replace_state(State(newest, kept, tuple(waiting.values()), seen_ms))
        for checkpoint in checkpoints:
            done = frozenset({Entry.DONE}) if checkpoint == newest else frozenset()
            self.ledger.forget(checkpoint, kept=done)

    def _seen_ms(self, left: list[Path]) -> int | None:
        setting = self.settings.partition_commit
        if setting is None or not isinstance(setting.trigger, PartitionTime):
            return None
        buckets = {str(path.parent.relative_to(self.files.root)) for path in left}
        times = [setting.trigger.time_ms(bucket, self.settings.assigners) for bucket in buckets]
        return max((time_ms for time_ms in times if time_ms is not None), default=None)

    def _success_names(self) -> list[str]:
        setting = self.settings.partition_commit
        policies = () if setting is None else setting.policies
        return [policy.name for policy in policies if isinstance(policy, SuccessFile)]

    def _finished(self) -> Iterator[tuple[Path, PartName]]:
        for path in self.disk.files_below(self.files.root):
            part = self.files.parse_finished(path.name)
            if part is not None and HIDDEN not in path.relative_to(self.files.root).parts:
                yield path, part
