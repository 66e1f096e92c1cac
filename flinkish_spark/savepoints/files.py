"""A savepoint's directory: finished or not, whole or damaged, whose it is.

    savepoint.json                    created last; without it there is no savepoint
    state/<operator uid>/<n>.parquet  rows of key group and state value
    claimed.json                      a job owns the files; deleted last

All names in it are relative, so it can be moved and copied with any tool.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

from flinkish_spark.errors import JobDirError, StoreError
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, JobUuid
from flinkish_spark.protocol.savepoints import STATE_ENDING, STATE_FOLDER, SavepointMetadata, StateFile
from flinkish_spark.protocol.seeding import Claim
from flinkish_spark.savepoints.errors import (
    SavepointClaimed,
    SavepointDamaged,
    SavepointFailed,
    SavepointNotFound,
)
from flinkish_spark.savepoints.state_files import sha256_of
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.store import CreateResult, LocalStore, ObjectMissing, make_directories

METADATA_KEY = "savepoint.json"
CLAIM_KEY = "claimed.json"
#: What a crash leaves of a write into the store.
_TEMPORARY = re.compile(r"\.(savepoint|claimed)\.json\.[0-9a-f]{32}\.tmp")


class SavepointDir:
    """One savepoint's directory.

    Parameters
    ----------
    path
        Absolute.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._store = LocalStore(path)
        self._objects = SealedObjects(self._store, f"the savepoint {path}")

    # -- reading --------------------------------------------------------------------------------
    def metadata(self) -> SavepointMetadata:
        """Return what the savepoint says about itself; creates nothing.

        Raises
        ------
        SavepointNotFound
            There is no finished savepoint.
        JobDirError
            A newer version of this package wrote it.
        CorruptObjectError
            It is torn or altered.
        """
        try:
            return self._objects.read(METADATA_KEY, "savepoint", SavepointMetadata.from_json)
        except ObjectMissing:
            there = "there is no savepoint.json in it" if self.path.is_dir() else "there is no such directory"
            raise SavepointNotFound(
                f"there is no savepoint at {self.path}",
                why=there + "; it is written last, when the savepoint is whole",
                what_to_do="give the directory that the trigger of the savepoint answered with",
                path=str(self.path),
            ) from None

    def is_there(self, savepoint: str) -> bool:
        """Whether this is the savepoint of that name; raises as :meth:`metadata` if it is damaged."""
        try:
            return self.metadata().savepoint == savepoint
        except SavepointNotFound:
            return False

    def check_files(self, files: Iterable[StateFile]) -> None:
        """Raise SavepointDamaged unless all files are there with their sizes; reads none of them."""
        for file in files:
            path = self._path_of(file)
            if path.stat().st_size != file.size_bytes:
                raise self._damaged(file, f"it has {path.stat().st_size} bytes instead of {file.size_bytes}")

    def take(self, files: Collection[StateFile], folder: Path) -> None:
        """Copy files below `folder`, where the file system can by a hard link, and check every byte.

        What is there already is replaced: it comes from a restore that was cut off.

        Raises
        ------
        SavepointDamaged
            A file is missing or altered.
        """
        for file in files:
            source, target = self._path_of(file), folder / file.path
            if sha256_of(source) != file.sha256:
                raise self._damaged(file, "its checksum does not match")
            make_directories(target.parent)
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
            # Also behind a link: a tool that moved the savepoint here may not have synced it.
            sync_file(target)

    def _path_of(self, file: StateFile) -> Path:
        path = self.path / file.path
        # Names were checked when they were read; a link could still lead elsewhere.
        if path.is_symlink() or not path.resolve().is_relative_to(self.path.resolve()):
            raise self._damaged(file, "it leads out of the savepoint")
        if not path.is_file():
            raise self._damaged(file, "there is no such file")
        return path

    def _damaged(self, file: StateFile, why: str) -> SavepointDamaged:
        return SavepointDamaged(
            f"the file {file.path} of the savepoint {self.path} cannot be used",
            why=why,
            what_to_do="restore the savepoint from a backup, or use another one",
            path=str(self.path),
            file=file.path,
        )

    # -- writing --------------------------------------------------------------------------------
    def finished_by(
        self, job: JobUuid, checkpoint: CheckpointId, timeline: str = ""
    ) -> SavepointMetadata | None:
        """Return the savepoint if this checkpoint was exported here before; None if nothing was.

        Parameters
        ----------
        timeline
            Token of the checkpoint; empty if it is not known.

        Raises
        ------
        SavepointFailed
            Another savepoint is here.
        """
        try:
            known = self.metadata()
        except SavepointNotFound:
            return None
        is_other = bool(timeline and known.timeline and timeline != known.timeline)
        if is_other or (known.job_uuid, known.checkpoint) != (job, checkpoint):
            raise SavepointFailed(
                f"there is another savepoint at {self.path}",
                why=f"it is checkpoint {known.checkpoint} of "
                + ("a copy of this job's directory" if is_other else f"job '{known.job}'"),
                what_to_do="export to a directory of its own",
            )
        return known

    def prepare(self) -> None:
        """Make the directory durably, or check that nothing of somebody else's is in it.

        Raises
        ------
        SavepointFailed
            It holds something that is no part of a savepoint, or what is left of a claimed one.
        StoreError
            It cannot be made or read.
        """
        try:
            strange = next(_strangers(self.path), None) if self.path.is_dir() else None
            is_claimed = os.path.lexists(self.path / CLAIM_KEY)
            if not strange and not is_claimed:
                make_directories(self.path)
        except OSError as error:
            raise StoreError.of_system(
                error,
                f"cannot write the savepoint {self.path}",
                what_to_do="check that the disk is there, has room, and may be written by this user",
            ) from error
        if strange:
            raise SavepointFailed(
                f"the directory {self.path} is not empty",
                why=f"it holds {strange.relative_to(self.path)}, which is no part of a savepoint",
                what_to_do="export to a directory of its own",
            )
        if is_claimed:
            raise SavepointFailed(
                f"the directory {self.path} holds {CLAIM_KEY}",
                why="a job owned the savepoint that was here, and may not be done with deleting it",
                what_to_do="export to a directory of its own, or delete this one if that job is gone",
            )

    def finish(self, metadata: SavepointMetadata) -> SavepointMetadata:
        """Create savepoint.json and remove files that it does not name; return what is there."""
        data = seal("savepoint", metadata.to_json())
        if self._store.create_if_absent(METADATA_KEY, data) is CreateResult.EXISTS:
            # Another export of the same checkpoint was faster. Its files are named, ours are not.
            found = self.finished_by(metadata.job_uuid, metadata.checkpoint, metadata.timeline)
            assert found is not None
            metadata = found
        named = {file.path for file in metadata.files}
        for path in sorted(self.path.glob(f"{STATE_FOLDER}/*/*{STATE_ENDING}")):
            if path.relative_to(self.path).as_posix() not in named:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
        return metadata

    # -- ownership ------------------------------------------------------------------------------
    def claimed_by(self, savepoint: str) -> Claim | None:
        """Return who owns the savepoint of that name here.

        Returns
        -------
        Claim | None
            None if nobody does: a claim that came with a copy is of the original.
        """
        claim = self._objects.optional(CLAIM_KEY, "claim", Claim.from_json)
        is_of_this = claim is not None and (claim.savepoint, claim.path) == (savepoint, self._here())
        return claim if is_of_this else None

    def check_unclaimed(self, job: JobUuid | None) -> None:
        """Refuse a savepoint that another job owns.

        Parameters
        ----------
        job
            None for a job that has claimed nothing.

        Raises
        ------
        SavepointNotFound
            There is no savepoint.
        SavepointClaimed
            A job other than `job` owns the files.
        """
        claim = self.claimed_by(self.metadata().savepoint)
        if claim is not None and claim.job != job:
            raise SavepointClaimed(
                f"the savepoint {self.path} belongs to another job",
                why=f"the job in {claim.owner} claimed it, and deletes it when it needs it no more",
                what_to_do="take a savepoint of that job, and restore with ClaimMode.NO_CLAIM next time; "
                f"or delete {CLAIM_KEY} if that job is gone for good",
                owner=claim.owner,
            )

    def claim(self, job: JobUuid, owner: str) -> None:
        """Make a job the owner of the files; of several jobs exactly one can.

        Parameters
        ----------
        owner
            The job directory, for people.

        Raises
        ------
        SavepointNotFound
            There is no savepoint.
        SavepointClaimed
            Another job was faster.
        """
        self.check_unclaimed(job)
        name = self.metadata().savepoint
        data = seal("claim", Claim(name, self._here(), job, owner).to_json())
        is_new = self._store.create_if_absent(CLAIM_KEY, data) is CreateResult.CREATED
        if not is_new and self.claimed_by(name) is None:
            # It came with a copy. Two jobs may replace it at once; the last one owns the files then.
            self._store.put(CLAIM_KEY, data)
        self.check_unclaimed(job)

    def delete(self, job: JobUuid, savepoint: str) -> None:
        """Delete a savepoint that the job claimed; called again after it was cut off, it finishes.

        Without a claim by this job on this savepoint it does nothing: the same directory may hold
        a later savepoint by now. Deletes named files only: what somebody else put here stays, and
        so does the directory then.
        """
        claim = self.claimed_by(savepoint)
        if claim is None or claim.job != job:
            return
        try:
            metadata = self.metadata()
        except SavepointNotFound:
            # All but the claim was deleted before.
            files: tuple[StateFile, ...] = ()
        except JobDirError:
            return
        else:
            if metadata.savepoint != savepoint:
                return
            files = metadata.files
        # The metadata goes behind what it names, or that would not be found again; the claim goes
        # last: while it is there, nobody writes another savepoint here.
        for file in files:
            self._store.delete(file.path)
        for key in (METADATA_KEY, CLAIM_KEY):
            self._store.delete(key)
        with contextlib.suppress(OSError):
            (self.path / STATE_FOLDER).rmdir()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _here(self) -> str:
        return str(self.path.resolve())


def _strangers(root: Path) -> Iterator[Path]:
    """Yield what is in a savepoint's directory and no export wrote; links are never followed."""
    for path in sorted(root.iterdir()):
        if path.name == STATE_FOLDER and path.is_dir() and not path.is_symlink():
            for folder in sorted(path.iterdir()):
                if folder.is_symlink() or not folder.is_dir():
                    yield folder
                else:
                    yield from (p for p in sorted(folder.iterdir()) if not _is_state_file(p))
        elif path.name not in (METADATA_KEY, CLAIM_KEY) and not _TEMPORARY.fullmatch(path.name):
            yield path


def _is_state_file(path: Path) -> bool:
    return path.suffix == STATE_ENDING and path.is_file() and not path.is_symlink()


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file and make its content durable; its name is not yet."""
    shutil.copyfile(source, target)
    sync_file(target)


def sync_file(path: Path) -> None:
    """Make the content of a file durable; its name is not yet."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())
