"""State of a retained checkpoint, for readers who are no part of the job.

What a checkpoint keeps of Spark's state is its pin (:mod:`flinkish_spark.runtime.pins`). Spark's state data
source wants files at the places where a query has them, so a *view* is made outside of the job directory: a
folder with the two log entries and links to the pinned files of one operator. The job directory is only read;
the job may run meanwhile, and may even delete the checkpoint: what is linked stays.

Where links between the two places are impossible there are symbolic ones, and a checkpoint that is deleted
while it is read is an error of the reader's.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from flinkish_spark.errors import CorruptObjectError, JobDirError
from flinkish_spark.forks import in_this_process
from flinkish_spark.job_dir import JobDir
from flinkish_spark.protocol.decisions import Verdict
from flinkish_spark.protocol.ids import CheckpointId, Lineage
from flinkish_spark.protocol.lineage import (
    FIRST_LINEAGE,
    LineageHistory,
    RetainedCheckpoint,
    RewindKind,
    why_not_rewindable,
)
from flinkish_spark.protocol.scans import OperatorInstance, PlanLayout
from flinkish_spark.runtime.pins import PINS, PinManifest
from flinkish_spark.runtime.spark_log import COMMITS, OFFSETS
from flinkish_spark.runtime.state_files import BASES, STATE, checksum_names
from flinkish_spark.savepoints.errors import CheckpointNotRetained
from flinkish_spark.savepoints.seeds import layout_fact
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.store import LocalStore


@dataclass(frozen=True)
class RetainedState:
    """The state of one checkpoint, as its pin has it.

    Parameters
    ----------
    root
        The job directory.
    manifest
        Of the pin.
    layout
        Names of the operators by Spark's numbers.
    """

    root: Path
    manifest: PinManifest
    layout: PlanLayout

    def operators(self, uid: str) -> Mapping[str, int]:
        """Return Spark's numbers of an operator, by the chain in which it runs."""
        return {one.chain: number for number, one in enumerate(self.layout.operators) if one.uid == uid}

    def view(self, number: int, scratch: Path | None) -> Path:
        """Return a new folder that looks like the query's checkpoint, with one operator's state.

        It is deleted when this process ends.

        Parameters
        ----------
        number
            Spark's number of the operator.
        scratch
            Where it is made, on a file system that driver and executors share; None for the system's folder
            of temporary files.

        Raises
        ------
        CheckpointNotRetained
            The job has given the checkpoint up meanwhile.
        """
        if scratch is not None:
            scratch.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix="flinkish-state-", dir=scratch))
        atexit.register(in_this_process(shutil.rmtree), made, ignore_errors=True)
        batch = self.manifest.batch
        for log in (OFFSETS, COMMITS):
            (made / log).mkdir()
            (made / log / str(batch)).write_text(self.manifest.log[f"{log}/{batch}"], encoding="utf-8")
        wanted = self._files_of(self.layout.operators[number], number)
        for name, size in wanted.items():
            self._bring(name, size, made / STATE / name)
        return made

    def _files_of(self, operator: OperatorInstance, number: int) -> dict[str, int]:
        own = (f"{number}/", f"{BASES}/{operator.uid}/")
        return {name: size for name, size in self.manifest.files.items() if name.startswith(own)}

    def _bring(self, name: str, size_bytes: int, target: Path) -> None:
        source = self.root / PINS / STATE / name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _link(source, target)
            found = target.stat().st_size
        except FileNotFoundError:
            raise self._gone(f"the kept state file {name} is gone") from None
        if found != size_bytes:
            raise self._gone(f"the kept state file {name} has {found} bytes instead of {size_bytes}")
        for checksum in checksum_names(target.name):
            # Not every file has one.
            with contextlib.suppress(FileNotFoundError):
                _link(source.with_name(checksum), target.with_name(checksum))

    def _gone(self, why: str) -> CheckpointNotRetained:
        return not_retained(self.root, self.manifest.checkpoint, why)


def is_job_dir(path: Path) -> bool:
    """Whether a directory is that of a job that has started."""
    return (path / "job.json").is_file()


def retained_state(root: Path, checkpoint: int | None) -> RetainedState:
    """Return the state of a retained checkpoint; reads only.

    Parameters
    ----------
    root
        The job directory, absolute.
    checkpoint
        None for the newest that is retained.

    Raises
    ------
    CheckpointNotRetained
        There is none such, or its state is not kept; says which are there.
    CorruptObjectError
        Something in the job directory cannot be trusted.
    JobDirError
        A newer, or a much older, version of this package wrote it.
    """
    job_dir = JobDir(LocalStore(root))
    objects = SealedObjects(job_dir.store, "the job directory")
    pinned = sorted(CheckpointId(number) for number in objects.numbers(PINS))
    history = job_dir.history()
    found = [one for one in pinned if _is_readable(job_dir, one, pinned, history)]
    wanted = max(found, default=None) if checkpoint is None else CheckpointId(checkpoint)
    if wanted is None:
        raise not_retained(root, None, "it has no completed checkpoints whose state is kept")
    why = _why_not(job_dir, wanted, pinned, history)
    manifest = objects.optional(f"{PINS}/{wanted}.json", "pin", PinManifest.from_json)
    decision = job_dir.decision(wanted)
    if why or manifest is None or decision is None:
        others = [int(one) for one in found if one != wanted]
        raise not_retained(root, wanted, why or "the job has deleted it just now", others)
    return RetainedState(root, manifest, _layout_in(job_dir, history, decision.lineage))


def not_retained(
    root: Path, checkpoint: CheckpointId | None, why: str, others: list[int] | None = None
) -> CheckpointNotRetained:
    """Return the error about a checkpoint whose state cannot be read."""
    what = f"the state of checkpoint {checkpoint} in {root} cannot be read"
    kept = ", ".join(map(str, others or ()))
    return CheckpointNotRetained(
        f"there is no checkpoint to read in {root}" if checkpoint is None else what,
        why=why,
        what_to_do=f"choose from: {kept}" if kept else "take a savepoint, or raise CheckpointConfig.retained",
        checkpoint=checkpoint,
    )


def _is_readable(
    job_dir: JobDir, checkpoint: CheckpointId, pinned: list[CheckpointId], history: LineageHistory
) -> bool:
    try:
        return not _why_not(job_dir, checkpoint, pinned, history)
    except CorruptObjectError:
        # A damaged one is the trouble of whoever asks for it.
        return False


def _why_not(
    job_dir: JobDir, checkpoint: CheckpointId, pinned: list[CheckpointId], history: LineageHistory
) -> str:
    """Return why the state of a checkpoint cannot be read; empty if it can."""
    known = job_dir.decided_ids()
    decision = job_dir.decision(checkpoint) if checkpoint in known else None
    commits = []
    if decision is not None and decision.verdict is Verdict.COMMIT:
        # What is decided will be confirmed, and its state does not change by that.
        commits = [RetainedCheckpoint(checkpoint, decision.lineage, True, checkpoint in pinned)]
    # A job cannot go back to before its log was begun anew, but who only reads can.
    rewinds = [one for one in history.rewinds if one.kind is not RewindKind.RESEED]
    return why_not_rewindable(checkpoint, known, commits, LineageHistory.of(rewinds))


def _layout_in(job_dir: JobDir, history: LineageHistory, lineage: Lineage) -> PlanLayout:
    """Return the names of the plan that ran in a lineage, which may not be the live one."""
    begun = [one.lineage for one in history.rewinds if one.kind is RewindKind.RESEED]
    origin = max((one for one in begun if one <= lineage), default=FIRST_LINEAGE)
    recorded = job_dir.recorded(layout_fact(origin))
    if recorded is None:
        raise JobDirError(
            "the job directory does not say in which order its operators are planned",
            why="it was begun by an older version",
            what_to_do="start and stop the job once as it was",
        )
    return PlanLayout.from_json(recorded)


def _link(source: Path, target: Path) -> None:
    if not source.exists():
        raise FileNotFoundError(source)
    try:
        os.link(source, target)
    except OSError:
        os.symlink(source, target)
