"""A file sink without Spark: staged text files, faults at every file operation, and what readers see."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flinkish_spark.connectors.files.committer import CommitSettings, FileCommitter
from flinkish_spark.connectors.files.disk import Disk, SinkFiles
from flinkish_spark.connectors.files.ledger import Ledger
from flinkish_spark.connectors.files.output_formats import FileFormat
from flinkish_spark.connectors.files.rolling import LineMerger
from flinkish_spark.connectors.staged_ids import StagedId
from flinkish_spark.contracts.sink import CompletedCheckpoint
from flinkish_spark.core.store import LocalStore
from flinkish_spark.protocol.ids import CheckpointId, CheckpointPurpose, JobUuid, OwnerEpoch
from flinkish_spark.protocol.records import Committable

JOB = JobUuid("a" * 32)
UID = "out"


def is_hidden(name: str) -> bool:
    """Say if readers, such as Spark and Hive, skip a file or folder."""
    return name.startswith(".") or (name.startswith("_") and "=" not in name)


class Killed(BaseException):
    """The process ended here."""


class Faults:
    """Kills at one of the file operations, before or after it is done.

    Parameters
    ----------
    at
        Counted from 0; None for never.
    """

    def __init__(
        self, at: int | None = None, after: bool = False, error: Callable[[], BaseException] = Killed
    ):
        self.at, self.after, self.error, self.count = at, after, error, 0

    def around(self, target: Any) -> Any:
        """Return `target` with every public method counted."""
        return _Faulty(target, self)


class _Faulty:
    def __init__(self, target: Any, faults: Faults) -> None:
        self._target, self._faults = target, faults

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            faults = self._faults
            mine, faults.count = faults.count, faults.count + 1
            if mine == faults.at and not faults.after:
                raise faults.error()
            result = method(*args, **kwargs)
            if mine == faults.at:
                raise faults.error()
            return result

        return call


@dataclass
class Rig:
    """One sink on one folder, and its past and coming processes."""

    tmp: Path
    settings: CommitSettings = field(default_factory=CommitSettings)
    options: Mapping[str, str] = field(default_factory=dict)
    kind: FileFormat = FileFormat.TEXT
    epoch: int = 1
    block: int = 0
    uid: str = UID

    @property
    def root(self) -> Path:
        return self.tmp / "target"

    @property
    def files(self) -> SinkFiles:
        return SinkFiles(self.root, JOB, self.uid)

    @property
    def ledger(self) -> Ledger:
        return Ledger(LocalStore(self.tmp / f"job-{self.uid}"))

    def committer(
        self, faults: Faults | None = None, settings: CommitSettings | None = None
    ) -> FileCommitter:
        """Return a committer of a new process."""
        disk: Any = Disk()
        store: Any = LocalStore(self.tmp / f"job-{self.uid}")
        if faults is not None:
            disk, store = faults.around(disk), faults.around(store)
        merger = LineMerger(disk, self.kind, self.options)
        epoch = OwnerEpoch(self.epoch)
        return FileCommitter(settings or self.settings, self.files, epoch, Ledger(store), merger)

    def stage(
        self, lines: Mapping[str, Sequence[str]], extension: str = ".txt", epoch: int = 0
    ) -> Committable:
        """Leave a micro-batch as a writer leaves it: a file per bucket and line."""
        self.block += 1
        staged = StagedId.new(OwnerEpoch(epoch or self.epoch), self.block)
        files = []
        for bucket, texts in lines.items():
            for task, text in enumerate(texts):
                name = f"part-{task:05d}-{uuid.uuid4()}-c000{extension}"
                relative = f"{bucket}/{name}" if bucket else name
                path = self.files.pending / str(staged) / relative
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text + "\n")
                files.append({"name": relative, "bytes": len(text) + 1, "rows": 1})
        payload = {"root": str(self.root), "staged": str(staged), "rows": len(files), "files": files}
        return Committable(self.uid, payload)

    def visible(self) -> dict[str, str]:
        """Return what readers see: relative path -> content."""
        return {
            str(path.relative_to(self.root)): path.read_text()
            for path in sorted(self.root.rglob("*"))
            if path.is_file() and not any(is_hidden(part) for part in path.relative_to(self.root).parts)
        }

    def lines(self) -> list[str]:
        """Return all lines that readers see, sorted."""
        return sorted(line for text in self.visible().values() for line in text.splitlines())

    def hidden(self) -> list[str]:
        """Return the files that readers do not see, below the sink's hidden folder, but for its mark."""
        found = self.files.hidden.rglob("*") if self.files.hidden.exists() else []
        names = (p.relative_to(self.files.hidden) for p in found if p.is_file())
        return sorted(str(name) for name in names if name.parts[0] != "timeline")


def completed(
    checkpoint: int, at_ms: int = 0, purpose: CheckpointPurpose = CheckpointPurpose.PERIODIC
) -> CompletedCheckpoint:
    return CompletedCheckpoint(CheckpointId(checkpoint), at_ms or checkpoint * 1_000, purpose)
