"""Completed checkpoints: pinned against Spark's cleaning, retained, and deleted in the end.

Spark keeps a fixed number of micro-batches; a job retains checkpoints for as long as it is configured. A pin
holds, for the micro-batch N of a checkpoint, the log entries offsets/N-1, offsets/N and commits/N, and all
files from which Spark loads state version N+1:

    pins/<checkpoint>.json        the manifest: log entries byte for byte, files and their sizes
    pins/state/<operator>/...     the files, laid out as below spark/<owner epoch>/state/

1. Files are immutable and their names unique over all lineages, so all pins share one pool: a pin adds the
   files that no earlier pin has, as hard links, or as copies where links are impossible.
2. The manifest is written last and deleted first. Without it there is no pin; files that no manifest names
   are garbage, which the next pin replaces or the next unpin deletes.
3. A restore makes Spark's state folder exactly what the manifest says. It deletes files of other versions:
   other checkpoints have their own pins, and Spark's cleaning counts from the highest version in the folder,
   dead or not.

A bucket has no links, and a copy of each file would cost a request. There a pin only names the files
(:class:`BucketPins`): Spark's own cleaning is off, and this module deletes files that no pin needs.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from flinkish_spark.checkpoint.ownership import Ownership, seal_open_ids
from flinkish_spark.checkpoint.pins import PINS, CheckpointPins, PinManifest
from flinkish_spark.checkpoint.spark_log import BucketLog, SparkLog, translate_disk_errors
from flinkish_spark.checkpoint.state_files import (
    StateFileNotFoundError,
    StateInBucket,
    StateOnDisk,
    StoreVersion,
    bases_up_to,
    checksum_names,
    files_of,
    is_of_operator,
    is_versioned,
    operator_files,
    store_versions,
    tables_of,
    version_named,
)
from flinkish_spark.core.clock import Clock
from flinkish_spark.core.config import CheckpointConfig
from flinkish_spark.core.errors import CorruptObjectError, JobDirError, StoreError
from flinkish_spark.core.job_dir import JobDir
from flinkish_spark.core.store import make_directories, sync_directory
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.bases import BASES, find_superseded
from flinkish_spark.protocol.decisions import Decision, Verdict
from flinkish_spark.protocol.ids import BatchId, CheckpointId, OwnerEpoch
from flinkish_spark.protocol.lineage import RewindKind
from flinkish_spark.protocol.micro_batches import COMMITS, OFFSETS, STATE
from flinkish_spark.protocol.retention import (
    CheckpointFact,
    CheckpointPart,
    CheckpointRetention,
    Deletion,
    RetentionFacts,
    find_deletions,
    find_deletions_on_cancel,
)

LOG = logging.getLogger(__name__)
#: How often a pin starts over when Spark's maintenance deletes a file meanwhile.
_TRIES = 5
#: The file system has no hard links, none between these folders, or the file has too many.
_NO_LINKS = frozenset({errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS})


class SparkPins(CheckpointPins):
    """Pins on a file system, where Spark cleans up its own folder."""

    def __init__(self, log: SparkLog, root: Path) -> None:
        super().__init__(log)
        self._state, self._pool = Path(log.location) / STATE, root / PINS / STATE

    def pin(self, decision: Decision) -> None:
        if decision.checkpoint in self.list_pinned():
            return
        entries = self._read_entries(decision)
        with translate_disk_errors(f"pin checkpoint {decision.checkpoint}"):
            files = self._link_state(decision)
        manifest = PinManifest(decision.checkpoint, decision.batch, entries, files)
        # This order matters: the manifest says that everything it names is there.
        self._write(manifest)

    def _link_state(self, decision: Decision) -> dict[str, int]:
        stores = store_versions(decision.commits_text, int(decision.batch))
        for left in reversed(range(_TRIES)):
            try:
                names = [name for store in stores for name in files_of(StateOnDisk(self._state), store)]
                names += operator_files(StateOnDisk(self._state), stores)
                names += bases_up_to(self._state, int(decision.batch))
                return self._link_all(names)
            except (StateFileNotFoundError, FileNotFoundError) as error:
                # Spark's maintenance replaces older files by a new snapshot.
                if not left:
                    raise CorruptObjectError(
                        f"the state of checkpoint {decision.checkpoint} vanishes while it is pinned",
                        why=str(error),
                        what_to_do="raise spark.sql.streaming.minBatchesToRetain",
                    ) from error
        raise AssertionError("the last try returns or raises")

    def _link_all(self, names: Iterable[str]) -> dict[str, int]:
        """Link files into the pool that no complete pin has there; return the sizes of all."""
        sizes, folders, pinned = dict[str, int](), set[Path](), dict[str, int]()
        for checkpoint in self.list_pinned():
            # A damaged pin is reported when a job goes back to it.
            with contextlib.suppress(CorruptObjectError, JobDirError):
                manifest = self._read_manifest(checkpoint)
                pinned |= {} if manifest is None else manifest.files
        for name in names:
            target = self._pool / name
            # A file that no manifest names was left by a crash and may be torn: link it again.
            if not target.exists() or target.stat().st_size != pinned.get(name):
                _link_with_checksums(self._state / name, target)
                folders.add(target.parent)
            sizes[name] = target.stat().st_size
        for folder in folders:
            sync_directory(folder)
        return sizes

    def _find_sizes(self, manifest: PinManifest) -> Mapping[str, int]:
        found = {}
        with translate_disk_errors(f"look at the pin of checkpoint {manifest.checkpoint}"):
            for name in manifest.files:
                with contextlib.suppress(FileNotFoundError):
                    found[name] = (self._pool / name).stat().st_size
        return found

    def restore(self, checkpoint: CheckpointId) -> None:
        manifest = self._read_restorable(checkpoint)
        with translate_disk_errors(f"restore checkpoint {checkpoint}"):
            self._put_back(manifest)
            for name, path in _files_below(self._state):
                if is_versioned(name) and _owner_of(name) not in manifest.files:
                    path.unlink(missing_ok=True)
        self._put_entries_back(manifest)

    def _put_back(self, manifest: PinManifest) -> None:
        folders = set()
        for name, size in manifest.files.items():
            target = self._state / name
            if target.exists() and (not is_versioned(name) or target.stat().st_size == size):
                continue
            _link_with_checksums(self._pool / name, target)
            folders.add(target.parent)
        for folder in folders:
            sync_directory(folder)

    def unpin(self, checkpoint: CheckpointId) -> None:
        super().unpin(checkpoint)
        needed = {name for manifest in self._read_all_manifests() for name in manifest.files}
        with translate_disk_errors(f"unpin checkpoint {checkpoint}"):
            for name, path in _files_below(self._pool):
                if _owner_of(name) not in needed:
                    path.unlink(missing_ok=True)


T = TypeVar("T")
R = TypeVar("R")
Copies = Callable[[Sequence[tuple[str, str]]], object]
#: How many files are copied, or looked into, at once.
_AT_ONCE = 16


def _map_at_once(do: Callable[[T], R], items: Iterable[T]) -> list[R]:
    """Call a function for each item, several at a time: each call waits for the bucket."""
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="flinkish-files") as pool:
        return list(pool.map(do, items))


class BucketPins(CheckpointPins):
    """Pins in a bucket: the files stay where Spark has written them."""

    #: How often the bucket is listed for files that no pin needs. A file is deleted when two listings found
    #: it unneeded: for a moment after its upload no manifest names a file.
    clean_every_ms = 10 * 60_000
    each = staticmethod(_map_at_once)

    def __init__(self, log: BucketLog, clock: Clock, copies: Copies | None = None) -> None:
        super().__init__(log)
        self._copies = copies or (lambda names: self.each(lambda pair: self._files.copy(*pair), names))
        self._files, self._epoch, self._clock = log.files, log.epoch, clock
        self._state = f"{log.folder}/{STATE}"
        self._suspects: frozenset[str] = frozenset()
        #: The bases of the last listing, and the newest pin since then.
        self._bases: frozenset[str] = frozenset()
        self._newest: PinManifest | None = None
        self._clean_at_ms = clock.monotonic_ms() + self.clean_every_ms

    def pin(self, decision: Decision) -> None:
        """Write which files the checkpoint needs; an earlier owner has written the same."""
        if decision.checkpoint in self._manifests:
            return
        entries = self._read_entries(decision)
        stores = store_versions(decision.commits_text, int(decision.batch))
        names, files = list[str](), dict[str, int]()
        if stores:
            state = StateInBucket(self._files, self._state, self._files.sizes_below(self._state))
            try:
                before = self._find_versions_before(decision, len(stores))
                wanted = [(store, before.get(store.folder)) for store in stores]
                names += itertools.chain(*self.each(lambda one: files_of(state, *one), wanted))
                names += operator_files(state, stores)
                files = {name: state.sizes[name] for name in names}
            except (StateFileNotFoundError, KeyError) as error:
                raise CorruptObjectError(
                    f"the state of checkpoint {decision.checkpoint} is not there",
                    why=f"{error.args[0]} is gone",
                    what_to_do="find out what deletes files of the job directory; the job does not",
                ) from error
        pin = PinManifest(decision.checkpoint, decision.batch, entries, files, self._state, decision.bases)
        self._write(pin)
        self._newest = pin

    def _find_versions_before(self, decision: Decision, most: int) -> Mapping[str, Sequence[StoreVersion]]:
        """Return the versions before that of a checkpoint, by the folder of the store; empty if unknown."""
        # The newest pin names those of its checkpoint, and Spark's log the later ones, at one read per
        # micro-batch. A store's own changelog names them, too, at one read per store.
        at, pins = decision.batch.value, self._manifests.values()
        pins_here = [one for one in pins if one.folder == self._state and one.batch.value < at]
        newest = max(pins_here, key=lambda one: one.batch, default=None)
        if newest is None or at - newest.batch.value - 1 > most:
            return {}
        since = [BatchId(number) for number in range(newest.batch.value, at)]
        texts = {batch: self._log.read(COMMITS, batch) for batch in since}
        # After a rewind other versions have these numbers.
        if texts[newest.batch] != newest.log[f"{COMMITS}/{newest.batch}"]:
            return {}
        found = [version for name in newest.files if (version := version_named(name)) is not None]
        for batch in since[1:]:
            text = texts[batch]
            if text is None:
                return {}
            found += store_versions(text, batch.value)
        by_store: dict[str, list[StoreVersion]] = {}
        for version in found:
            by_store.setdefault(version.folder, []).append(version)
        return by_store

    def _find_sizes(self, manifest: PinManifest) -> Mapping[str, int]:
        found = self._files.sizes_below(manifest.folder) if manifest.files else {}
        bases = self._files.sizes_below(BASES) if manifest.bases else {}
        return {**found, **{f"{BASES}/{name}": size for name, size in bases.items()}}

    def restore(self, checkpoint: CheckpointId) -> None:
        """Copy missing files, then restore the log entries; bases stay where they are."""
        manifest = self._read_restorable(checkpoint)
        if manifest.files:
            there = self._files.sizes_below(self._state)
            # Names of versions are unique over all lineages; those of an operator's metadata are not.
            missing = [
                name
                for name, size in manifest.files.items()
                if name not in there or (is_versioned(name) and there[name] != size)
            ]
            self._copies([(f"{manifest.folder}/{name}", f"{self._state}/{name}") for name in missing])
            # Spark would keep the metadata of a later micro-batch when it runs again.
            later = [name for name in there if is_of_operator(name) and name not in manifest.files]
            self._files.delete_all([f"{self._state}/{name}" for name in later])
        # This order matters: a log entry implies that the state of its micro-batch is there.
        self._put_entries_back(manifest)

    def clean(self, require_owner: Callable[[], None]) -> None:
        """Delete files that are unneeded now and were unneeded at the last cleaning."""
        now_ms = self._clock.monotonic_ms()
        if now_ms < self._clean_at_ms:
            return
        self._clean_at_ms = now_ms + self.clean_every_ms
        found = self._find_unneeded()
        gone = found & self._suspects
        self._suspects = found - gone
        gone |= {f"{BASES}/{name}" for name in self._find_superseded_bases()}
        if gone:
            require_owner()
            self._files.delete_all(gone)

    def _find_superseded_bases(self) -> frozenset[str]:
        """Return bases that were listed in the last call and that no pin needs."""
        listed, newest = self._bases, self._newest
        pins = self._read_all_manifests()
        # This order matters: bases that are listed now are judged after a newer pin.
        self._bases, self._newest = frozenset(), None
        if any(pin.bases for pin in pins):
            self._bases = frozenset(self._files.sizes_below(BASES))
        if newest is None:
            return frozenset()
        return find_superseded(listed, newest.live_bases, [pin.live_bases for pin in pins])

    def _find_unneeded(self) -> frozenset[str]:
        """Return keys, also of earlier owners, that are older than the oldest pin and that no pin names."""
        # This order matters: a pin that is written after the listing names only files that are newer than the
        # oldest pin in it, or that another pin names.
        sizes = self._files.sizes_below("spark")
        manifests = self._read_all_manifests()
        if not manifests:
            return frozenset()
        named = {f"{one.folder}/{name}" for one in manifests for name in one.files}
        first = min(manifests, key=lambda one: one.batch)
        oldest, found = first.batch.value, set()
        for name in sizes:
            epoch, _, below = name.partition("/")
            if not below or not epoch.isdecimal() or int(epoch) > self._epoch:
                continue
            if int(epoch) < self._epoch or _is_older(_owner_of(below), oldest):
                found.add(f"spark/{name}")
        mine = f"{self._state.removeprefix('spark/')}/"
        here = {name.removeprefix(mine): size for name, size in sizes.items() if name.startswith(mine)}
        kept = named | self._snapshots_behind(first, StateInBucket(self._files, self._state, here))
        return frozenset(key for key in found if _owner_of(key) not in kept)

    def _snapshots_behind(self, pinned: PinManifest, state: StateInBucket) -> frozenset[str]:
        """Return snapshots that are newer than those of a pin, and the shared files that they name."""
        # Also snapshots of the pinned version: Spark's maintenance may upload one after the pin is written,
        # and later versions are loaded from it.
        bases = {name.rpartition("/")[0]: _snapshot_of(name) for name in pinned.files if _snapshot_of(name)}
        newer = [name for name in state.sizes if _snapshot_of(name) > bases.get(name.rpartition("/")[0], 0)]
        tables = zip(newer, self.each(partial(tables_of, state), newer), strict=True)
        below = [f"{name.rpartition('/')[0]}/{table}" for name, named in tables for table in named]
        return frozenset(f"{self._state}/{name}" for name in (*newer, *below))


def pins_of(log: SparkLog, job_dir: StoreSpec, clock: Clock, copies: Copies | None = None) -> CheckpointPins:
    return BucketPins(log, clock, copies) if isinstance(log, BucketLog) else SparkPins(log, job_dir.folder)


def _snapshot_of(name: str) -> int:
    return (_version_of(name) or 0) if name.endswith(".zip") else 0


def _version_of(name: str) -> int | None:
    named = version_named(name)
    return None if named is None else named.version


def _is_older(name: str, oldest: int) -> bool:
    """Return whether no checkpoint from micro-batch `oldest` on needs a file; not for snapshots."""
    folder, _, rest = name.partition("/")
    if folder in (OFFSETS, COMMITS):
        # Spark's restart also reads the entry before the newest.
        return rest.isdecimal() and int(rest) < oldest - 1
    if folder != STATE or not is_versioned(rest):
        return False
    version = _version_of(rest)
    return version is None or version <= oldest + 1


def _files_below(folder: Path) -> list[tuple[str, Path]]:
    found = []
    for directory, _, names in os.walk(folder):
        found += [(str((Path(directory) / n).relative_to(folder)), Path(directory) / n) for n in names]
    return found


def _owner_of(name: str) -> str:
    """Return the file that a checksum file belongs to; other names are returned unchanged."""
    folder, _, plain = name.rpartition("/")
    plain = plain.removeprefix(".")
    while plain.endswith(".crc"):
        plain = plain.removesuffix(".crc")
    return f"{folder}/{plain}" if folder else plain


def _link(source: Path, target: Path) -> None:
    """Link a file durably to `target`, replacing it; copy it where links fail."""
    part = target.with_name(f".{target.name}.part")
    part.unlink(missing_ok=True)
    try:
        os.link(source, part)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        # With its times: Spark takes table files for orphans by their age.
        shutil.copy2(source, part)
    # This order matters: a name implies the whole content, also after a power cut, and Spark does not
    # sync its files.
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
    # If both were names of one file, os.replace has done nothing.
    part.unlink(missing_ok=True)


def _link_with_checksums(source: Path, target: Path) -> None:
    target.unlink(missing_ok=True)
    make_directories(target.parent)
    for checksum in checksum_names(target.name):
        # With a checksum of other content Spark would refuse the file; it may be missing.
        target.with_name(checksum).unlink(missing_ok=True)
        if source.with_name(checksum).exists():
            _link(source.with_name(checksum), target.with_name(checksum))
    _link(source, target)


def fence_in_bucket(log: BucketLog, job_dir: JobDir, pins: Callable[[BucketLog], CheckpointPins]) -> None:
    """Make the folder of a new owner; called after the takeover, before anything is read from it.

    Nothing can be renamed in a bucket, so the folder begins with copies: the files by which Spark knows the
    query, and log entries and state of the newest decided checkpoint. Later micro-batches of an earlier owner
    run again; the recovery aborts their staged data. A JVM that outlived its driver goes on writing into the
    older folder, from which only files that pins name are read.
    """
    newest = job_dir.newest_commit()
    if newest is not None and newest.lineage < job_dir.history().log_began_in:
        newest = None
    before = BucketLog.find_newest_complete(log.store, OwnerEpoch(log.epoch))
    if before is not None:
        older = log.open_sibling(f"spark/{before}")
        log.copy_query_files(older)
        intent = job_dir.open_rewind()
        # A new log has its seed already, and the older state may be deleted.
        if newest is not None and (intent is None or intent.kind is not RewindKind.RESEED):
            if job_dir.receipt(newest.checkpoint) is None:
                # Its data may be lost; then its micro-batches have to be staged again, one by one.
                log.copy_entries(older, OFFSETS, [staged.batch for staged in newest.batches])
            try:
                pins(older).pin(newest)
                pins(log).restore(newest.checkpoint)
            except CorruptObjectError as error:
                # The start fails only if this state is needed: a rewind order may go back further.
                LOG.error("the job cannot go on from checkpoint %s: %s", newest.checkpoint, error)
    # This order matters: the folder is complete by now. The next owner goes on from the newest complete
    # folder, so a crash before this line does no harm.
    log.mark_complete()


#: Confirmed checkpoints between two searches for deletable ones, in a bucket: a search takes five requests.
_AT_ONCE_IN_BUCKETS = 10


class CompletedCheckpoints:
    """The store of one owner's completed checkpoints; used by one thread at a time."""

    def __init__(
        self,
        job_dir: JobDir,
        config: CheckpointConfig,
        pins: CheckpointPins,
        in_use: Callable[[], frozenset[CheckpointId]],
        ownership: Ownership,
    ) -> None:
        self._job_dir, self._config, self._pins, self._in_use = job_dir, config, pins, in_use
        self._ownership = ownership
        #: Decisions and receipts never change, so each is read once.
        self._known: dict[CheckpointId, CheckpointFact] = {}
        #: How many checkpoints are confirmed between two searches for old ones, and how many are left.
        self._at_once = 1 if job_dir.place is None or job_dir.place.is_local else _AT_ONCE_IN_BUCKETS
        self._to_come = 1

    def on_decided(self, decision: Decision) -> bool:
        """Pin a checkpoint before sinks commit it; return whether that worked."""
        # Commits may take long while Spark goes on and cleans up, and a rewind may need this state. A failed
        # pin is tried again after the receipt.
        try:
            self._pins.pin(decision)
        except (StoreError, CorruptObjectError) as error:
            LOG.warning("checkpoint %s is pinned later: %s", decision.checkpoint, error)
            return False
        return True

    def on_confirmed(self, decision: Decision) -> None:
        """Pin a confirmed checkpoint and delete those that are not retained; called after the receipt."""
        # Errors are only logged: the checkpoint is complete.
        try:
            self._pins.pin(decision)
        except (StoreError, CorruptObjectError) as error:
            LOG.error("checkpoint %s cannot be gone back to later: %s", decision.checkpoint, error)
        try:
            self._to_come -= 1
            if self._to_come <= 0:
                self._to_come = self._at_once
                self._delete(find_deletions(self._facts()))
            self._pins.clean(self._ownership.check)
        except (StoreError, CorruptObjectError, JobDirError) as error:
            LOG.warning("old checkpoints are deleted later: %s", error)

    def on_cancelled(self, clock: Clock) -> None:
        """Delete the checkpoints of a cancelled job if the configuration says so."""
        if self._config.retention is CheckpointRetention.RETAIN_ON_CANCELLATION:
            return
        ownership = self._ownership
        ownership.check()
        seal_open_ids(ownership, clock)
        known = self._job_dir.list_checkpoint_ids()
        if known:
            # Ids continue from the highest in the directory: by them sinks recognise repeated commits.
            reason = "the job was cancelled and its checkpoints deleted"
            seal = Decision(known[-1].next(), Verdict.ABORT, ownership.epoch, clock.wall_ms(), reason=reason)
            self._job_dir.create_decision(seal)
        self._delete(find_deletions_on_cancel(self._facts(), self._config.retention))

    def _facts(self) -> RetentionFacts:
        # This order matters: a pin is made after its checkpoint's folder and deleted after it. So a pin that
        # is listed first and has no folder later was left by a crash.
        pinned = self._pins.list_pinned()
        ids = self._job_dir.list_checkpoint_ids()
        self._known = {one: fact for one, fact in self._known.items() if one in ids}
        order, intent = self._job_dir.rewind_order(), self._job_dir.open_rewind()
        targets = [one.target for one in (order, intent) if one is not None and one.target is not None]
        return RetentionFacts(
            checkpoints=tuple(self._fact(one) for one in ids),
            history=self._job_dir.history(),
            retained=self._config.retained,
            pinned=pinned,
            in_use=self._in_use(),
            referenced=frozenset(targets),
        )

    def _fact(self, checkpoint: CheckpointId) -> CheckpointFact:
        known = self._known.get(checkpoint)
        if known is not None:
            return known
        try:
            decision = self._job_dir.first_decision(checkpoint)
        except (CorruptObjectError, JobDirError) as error:
            LOG.warning("checkpoint %s cannot be read and is not deleted: %s", checkpoint, error)
            return CheckpointFact(checkpoint, None)
        has_receipt = self._job_dir.receipt(checkpoint) is not None
        if decision is None:
            return CheckpointFact(checkpoint, None, has_receipt=has_receipt)
        fact = CheckpointFact(
            checkpoint, decision.verdict, decision.lineage, has_receipt, decision.purpose.is_savepoint
        )
        if has_receipt or decision.verdict is Verdict.ABORT:
            self._known[checkpoint] = fact
        return fact

    def _delete(self, deletions: tuple[Deletion, ...]) -> None:
        # This order matters for each checkpoint, and not between two of them: see `CheckpointPart`.
        for part in CheckpointPart:
            checkpoints = [one.checkpoint for one in deletions if part in one.parts]
            if not checkpoints:
                continue
            # The facts may be old: a newer owner may keep other checkpoints.
            self._ownership.check()
            if part is CheckpointPart.PIN:
                for checkpoint in checkpoints:
                    self._pins.unpin(checkpoint)
            elif part is CheckpointPart.RESTAGED:
                self._job_dir.forget_restaged(checkpoints)
            else:
                self._job_dir.delete_all(f"checkpoints/{one}/{part.value}" for one in checkpoints)
