"""Spark's own checkpoint of the query: its place, its two logs, and how a rewind sets them back.

The folder's name is the owner epoch, ``spark/<owner epoch>``. On a disk a takeover renames it, so a JVM of
the previous owner writes to a path that no longer exists. In a bucket nothing can be renamed: the new owner's
folder begins with copies, and such a JVM goes on in the old folder, which is not read any more. Within one
owner the path stays, so restarts inside a process need neither.

Entries are written by Spark (temporary file, then rename; in a bucket with one request), so an entry is
whole or absent. On a disk each has a hidden checksum file, which must be deleted with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from flinkish_spark.core.errors import CorruptObjectError, FencedError, StoreError
from flinkish_spark.core.job_dir import BEGINNINGS
from flinkish_spark.core.offset_log import LoggedOffsets
from flinkish_spark.core.store import FileStore, ObjectMissing, SealedObjects, Store
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.bases import BASES
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import BatchId, CheckpointId, Lineage, OwnerEpoch
from flinkish_spark.protocol.lineage import FIRST_LINEAGE
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS, STATE

#: Folder of replays below the job directory.
REPLAY = "replay"
#: Folders in which Python sources record their first offsets, and in which those of seeded lineages do.
FIRST_OFFSETS, SEEDS = f"{BEGINNINGS}/first-offsets", "seeds"
_SOURCES = "sources"
#: Files by which Spark knows the query, and where its own sources began.
_OF_THE_QUERY = ("metadata", _SOURCES)


def fence_spark_folder(job_root: Path, epoch: OwnerEpoch) -> str:
    """Rename Spark's checkpoint to carry `epoch` and return its key below the job directory."""
    # One rename is the fence for everything Spark writes: offsets, commits and state.
    parent = job_root / "spark"
    parent.mkdir(exist_ok=True)
    mine = parent / str(epoch)
    older = sorted(int(p.name) for p in parent.iterdir() if p.name.isdecimal() and int(p.name) < epoch.value)
    if not mine.exists() and older:
        try:
            os.rename(parent / str(older[-1]), mine)
        except FileNotFoundError:
            raise FencedError(
                f"Spark's checkpoint {older[-1]} was taken by a newer owner than {epoch}",
                what_to_do="let this process end; the newer owner goes on",
            ) from None
    mine.mkdir(exist_ok=True)
    for stray in older[:-1]:
        # Made by a JVM that outlived its driver and the fence; it is never read.
        shutil.rmtree(parent / str(stray), ignore_errors=True)
    return f"spark/{epoch}"


@dataclass(frozen=True, slots=True)
class SparkLog:
    """The offset log and the commit log of the query."""

    #: Rooted at the job directory.
    store: Store
    #: Key of Spark's checkpoint, from :func:`fence_spark_folder`.
    folder: str
    #: The same as the driver finds it: an absolute path, or a URL of Hadoop's.
    location: str

    @property
    def hadoop_url(self) -> str:
        return StoreSpec(str(self.location)).hadoop_url

    def batches(self, log: str) -> frozenset[BatchId]:
        names = (key.rsplit("/", 1)[1] for key in self.store.list(f"{self.folder}/{log}"))
        return frozenset(BatchId(int(name)) for name in names if name.isdecimal())

    def read(self, log: str, batch: BatchId) -> str | None:
        """Return an entry's text, or None while Spark has not written it."""
        try:
            return self.store.read(f"{self.folder}/{log}/{batch}").decode("utf-8")
        except ObjectMissing:
            return None

    def check(self) -> None:
        """Check the files that Spark reads when it starts the query: its id, and the newest entries."""
        known = [f"{self.folder}/metadata"]
        for log in (OFFSETS, COMMITS):
            known += [f"{self.folder}/{log}/{batch}" for batch in sorted(self.batches(log))[-2:]]
        for key in known:
            try:
                text = self.store.read(key).decode("utf-8", errors="replace")
            except ObjectMissing:
                continue
            # Spark would fail with its parser's message, which names no file.
            if not _is_whole(text):
                raise CorruptObjectError(
                    f"the file {self._locate(key)} of Spark's own log is cut off or was changed",
                    why="it has no complete entry, because of a full disk, an incomplete copy, or an editor",
                    what_to_do="restore the file from a backup, or go back to an older checkpoint "
                    "(flinkish rewind)",
                    file=self._locate(key),
                )

    def restore(self, log: str, batch: BatchId, text: str) -> None:
        # With the checksum file of other content Spark would refuse the entry; it may be missing.
        self._delete_checksum(log, str(batch))
        self.store.put(f"{self.folder}/{log}/{batch}", text.encode("utf-8"))

    def retire(self, lineage: Lineage) -> None:
        """Move Spark's checkpoint aside and make an empty one; may be repeated until Spark writes there."""
        aside = self._retired / str(lineage)
        with translate_disk_errors(f"move Spark's checkpoint {self.location} aside"):
            if aside.exists():
                # An earlier call was cut off after the rename: the folder is empty, or a fenced JVM wrote it.
                shutil.rmtree(self.location, ignore_errors=True)
            else:
                aside.parent.mkdir(exist_ok=True)
                os.rename(self.location, aside)
            Path(self.location).mkdir(parents=True, exist_ok=True)

    def forget_retired(self) -> None:
        shutil.rmtree(self._retired, ignore_errors=True)

    def _locate(self, key: str) -> str:
        return str(self.location).removesuffix(self.folder) + key

    @property
    def root(self) -> Path:
        return Path(self.location).parents[self.folder.count("/")]

    @property
    def _own_name(self) -> str:
        return self.folder.rpartition("/")[2]

    @property
    def _retired(self) -> Path:
        return self.root / "spark-retired"

    def begin_replay(self, checkpoint: CheckpointId) -> SparkLog:
        """Return a new log for a replay, with only the files by which Spark knows the query."""
        self.end_replay()
        # Named by owner epoch: the folder of a driver that has lost the job is deleted.
        name = f"{REPLAY}/{self._own_name}-{checkpoint}"
        begun = SparkLog(self.store, name, str(self.root / name))
        here, there = Path(self.location), Path(begun.location)
        with translate_disk_errors(f"begin a replay in {begun.location}"):
            there.mkdir(parents=True)
            for known in _OF_THE_QUERY:
                if (here / known).is_dir():
                    # Where sources began, for a query that starts with its first micro-batch.
                    shutil.copytree(here / known, there / known)
                elif (here / known).exists():
                    shutil.copy2(here / known, there / known)
        return begun

    def end_replay(self) -> None:
        """Delete the folders of replays of this owner and earlier ones."""
        folder = self.root / REPLAY
        for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
            # This process may not be the owner any more and find that out only later.
            if self._is_up_to_mine(name):
                shutil.rmtree(folder / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            folder.rmdir()

    def _is_up_to_mine(self, name: str) -> bool:
        epoch, mine = _epoch_in(name), _epoch_in(self._own_name)
        return epoch is not None and mine is not None and epoch <= mine

    def find_first_offsets(self, lineage: Lineage = FIRST_LINEAGE) -> LoggedOffsets:
        """Return where the sources stood before the first micro-batch, as far as they have recorded it."""
        found = list(self.first_positions().values())
        begins = self.store.list(f"{SEEDS}/{lineage}/begin")
        seeded = [key for begin in begins for key in self.store.list(f"{begin}/first-offsets")]
        # A source that the seed positions may have recorded the beginning of an older log under its name.
        names = {_name(key) for key in seeded}
        others = [key for key in self.store.list(FIRST_OFFSETS) if _name(key) not in names]
        objects = SealedObjects(self.store, "the job directory")
        for key in (*seeded, *others):
            first = objects.optional(key, "first-offsets", dict)
            found.append({} if first is None else first["offsets"])
        return LoggedOffsets(tuple(found))

    def first_positions(self) -> dict[int, Any]:
        """Return the first positions that Spark's own sources have recorded, by source number in the plan."""
        found = {}
        for source in self.store.list(f"{self.folder}/{_SOURCES}"):
            with contextlib.suppress(ObjectMissing):
                found[int(_name(source))] = _position(f"{source}/0", self.store.read(f"{source}/0"))
        return dict(sorted(found.items()))

    def clear_state(self) -> None:
        """Delete all state: Spark refuses that of another query before a first micro-batch."""
        shutil.rmtree(Path(self.location) / STATE, ignore_errors=True)

    def remove(self, entry: str) -> None:
        """Delete an entry given as ``offsets/17`` or ``commits/17``, with its checksum file."""
        log, _, batch = entry.partition("/")
        if log not in (OFFSETS, COMMITS) or not batch.isdecimal():
            raise CorruptObjectError(f"{entry!r} is not an entry of Spark's logs")
        self._delete_checksum(log, batch)
        self.store.delete(f"{self.folder}/{entry}")

    def _delete_checksum(self, log: str, batch: str) -> None:
        self.store.delete(f"{self.folder}/{log}/.{batch}.crc")


def log_of(store: Store, job_dir: StoreSpec, epoch: OwnerEpoch) -> SparkLog:
    """Return the log of an owner, which has been fenced for it or will be."""
    folder = f"spark/{epoch}"
    place = job_dir.to_child(folder)
    if job_dir.is_local:
        return SparkLog(store, folder, place.url)
    return BucketLog(store, folder, place.hadoop_url)


def place_of_bases(job_dir: StoreSpec, log: SparkLog) -> StoreSpec:
    if job_dir.is_local:
        return StoreSpec(str(log.location)).to_child(f"{STATE}/{BASES}")
    return job_dir.to_child(BASES)


class BucketLog(SparkLog):
    """A :class:`SparkLog` in a bucket, where nothing is renamed; its store is a :class:`.FileStore`.

    Spark cleans nothing up there: files that checkpoints need stay, and :class:`.BucketPins` deletes the
    others.
    """

    __slots__ = ()

    @property
    def epoch(self) -> int:
        """Owner epoch of the log, or of the owner whose replay it is."""
        return _epoch_in(self._own_name) or 0

    @property
    def hadoop_url(self) -> str:
        return self.location

    @property
    def files(self) -> FileStore:
        return cast("FileStore", self.store)

    def open_sibling(self, folder: str) -> BucketLog:
        return BucketLog(self.store, folder, self._locate(folder))

    @staticmethod
    def find_newest_complete(store: Store, below: OwnerEpoch) -> OwnerEpoch | None:
        epochs = SealedObjects(store, "the job directory").numbers("spark")
        newest = max((epoch for epoch in epochs if epoch < below.value), default=None)
        return None if newest is None else OwnerEpoch(newest)

    def copy_query_files(self, older: BucketLog) -> None:
        for known in _OF_THE_QUERY:
            with contextlib.suppress(ObjectMissing):
                self.files.copy(f"{older.folder}/{known}", f"{self.folder}/{known}")
            for below in self.files.sizes_below(f"{older.folder}/{known}"):
                # Hidden files are not in their place yet: an earlier owner may be writing them (HDFS).
                if not _name(below).startswith("."):
                    self.files.copy(f"{older.folder}/{known}/{below}", f"{self.folder}/{known}/{below}")

    def copy_entries(self, older: BucketLog, log: str, batches: Iterable[BatchId]) -> None:
        """Copy the entries of micro-batches, as far as they exist."""
        for batch in batches:
            with contextlib.suppress(ObjectMissing):
                self.files.copy(f"{older.folder}/{log}/{batch}", f"{self.folder}/{log}/{batch}")

    def mark_complete(self) -> None:
        self.store.put(f"{self.folder}.json", seal("spark-log", {}))

    def retire(self, lineage: Lineage) -> None:
        """Delete Spark's whole checkpoint; the next lineage begins with its seed."""
        self._delete_below(self.folder)

    def forget_retired(self) -> None: ...

    def begin_replay(self, checkpoint: CheckpointId) -> BucketLog:
        self.end_replay()
        begun = self.open_sibling(f"{REPLAY}/{self._own_name}-{checkpoint}")
        begun.copy_query_files(self)
        return begun

    def end_replay(self) -> None:
        for key in self.store.list(REPLAY):
            if self._is_up_to_mine(_name(key)):
                self._delete_below(key)

    def clear_state(self) -> None:
        self._delete_below(f"{self.folder}/{STATE}")

    def _delete_below(self, folder: str) -> None:
        self.files.delete_all([f"{folder}/{name}" for name in self.files.sizes_below(folder)])

    def _delete_checksum(self, log: str, batch: str) -> None:
        """Do nothing: a bucket has no checksum files."""


def _is_whole(text: str) -> bool:
    """Return whether each line of a Spark log file, after an optional version line, is a JSON value."""
    lines = text.strip().split("\n")
    values = lines[1:] if lines[0].startswith("v") else lines
    try:
        return bool([json.loads(value) for value in values if value != "-"] or values)
    except ValueError:
        return False


def _position(key: str, data: bytes) -> Any:
    # Spark's metadata logs begin with a zero byte and a version.
    text = data.decode("utf-8", errors="replace")
    try:
        return json.loads(text[max(0, text.find("{")) :])
    except ValueError as error:
        raise CorruptObjectError(
            f"{key}, in which Spark keeps where a source began, cannot be read",
            why=str(error),
            what_to_do="restore the file from a backup",
            key=key,
        ) from error


def _name(key: str) -> str:
    return key.rpartition("/")[2]


def _epoch_in(name: str) -> int | None:
    """Return the owner epoch that a folder's name begins with; None if it does not begin with one."""
    epoch = name.partition("-")[0]
    return int(epoch) if epoch.isdecimal() else None


@contextlib.contextmanager
def translate_disk_errors(what: str) -> Iterator[None]:
    """Raise StoreError for an OSError, with what could not be done."""
    try:
        yield
    except OSError as error:
        advice = "check that the disk is there, has room, and may be written by this user"
        raise StoreError.from_os_error(error, f"cannot {what}", what_to_do=advice) from error


def missing_entry(log: str, batch: BatchId, checkpoint: CheckpointId) -> CorruptObjectError:
    return CorruptObjectError(
        f"Spark's log entry {log}/{batch} is gone",
        why=f"the job cannot go on from checkpoint {checkpoint} without it, and there is no copy",
        what_to_do="restore the file from a backup, or go back to an older checkpoint",
        checkpoint=checkpoint,
    )
