"""A savepoint's directory: finished or not, whole or damaged, whose it is.

    savepoint.json                    created last; without it there is no savepoint
    state/<operator uid>/<n>.parquet  rows of key group and state value
    claimed.json                      a job owns the files

All names in it are relative, so it can be moved and copied with any tool.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from flinkish_spark.errors import JobDirError, StoreError
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, JobUuid
from flinkish_spark.protocol.savepoints import STATE_FOLDER, SavepointMetadata, StateFile
from flinkish_spark.savepoints.errors import (
    SavepointClaimed,
    SavepointDamaged,
    SavepointFailed,
    SavepointNotFound,
)
from flinkish_spark.savepoints.state_files import sha256_of
from flinkish_spark.sealed_objects import SealedObjects
from flinkish_spark.store import CreateResult, LocalStore, ObjectMissing

METADATA_KEY = "savepoint.json"
CLAIM_KEY = "claimed.json"
_OURS = frozenset({METADATA_KEY, CLAIM_KEY, STATE_FOLDER})


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
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:
                copy_durably(source, target)

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
    def finished_by(self, job: JobUuid, checkpoint: CheckpointId) -> SavepointMetadata | None:
        """Return the savepoint if this checkpoint was exported here before; None if nothing was.

        Raises
        ------
        SavepointFailed
            Another savepoint is here.
        """
        try:
            known = self.metadata()
        except SavepointNotFound:
            return None
        if (known.job_uuid, known.checkpoint) != (job, checkpoint):
            raise SavepointFailed(
                f"there is another savepoint at {self.path}",
                why=f"it is checkpoint {known.checkpoint} of job '{known.job}'",
                what_to_do="export to a directory of its own",
            )
        return known

    def prepare(self) -> None:
        """Make the directory, or check that nothing of somebody else's is in it.

        Raises
        ------
        SavepointFailed
            It holds something that is no part of a savepoint.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            strange = sorted(p.name for p in self.path.iterdir() if p.name not in _OURS)
        except OSError as error:
            raise StoreError(f"cannot write the savepoint {self.path}", why=str(error)) from error
        if strange:
            raise SavepointFailed(
                f"the directory {self.path} is not empty",
                why=f"it holds {strange[0]}",
                what_to_do="export to a directory of its own",
            )

    def finish(self, metadata: SavepointMetadata) -> SavepointMetadata:
        """Create savepoint.json and remove files that it does not name; return what is there."""
        data = seal("savepoint", metadata.to_json())
        if self._store.create_if_absent(METADATA_KEY, data) is CreateResult.EXISTS:
            # Another export of the same checkpoint was faster. Its files are named, ours are not.
            found = self.finished_by(metadata.job_uuid, metadata.checkpoint)
            assert found is not None
            metadata = found
        named = {file.path for file in metadata.files}
        for path in sorted(self.path.glob(f"{STATE_FOLDER}/*/*")):
            if path.relative_to(self.path).as_posix() not in named:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
        return metadata

    # -- ownership ------------------------------------------------------------------------------
    def check_unclaimed(self, owner: str) -> None:
        """Raise SavepointClaimed if a job other than `owner` owns the files."""
        claim = self._objects.optional(CLAIM_KEY, "claim", dict)
        if claim is not None and claim["owner"] != owner:
            raise SavepointClaimed(
                f"the savepoint {self.path} belongs to another job",
                why=f"the job in {claim['owner']} claimed it, and deletes it when it needs it no more",
                what_to_do="take a savepoint of that job, or restore with ClaimMode.NO_CLAIM next time",
                owner=claim["owner"],
            )

    def claim(self, owner: str) -> None:
        """Make `owner` the owner of the files; of several jobs exactly one can.

        Raises
        ------
        SavepointClaimed
            Another job was faster.
        """
        self._store.create_if_absent(CLAIM_KEY, seal("claim", {"owner": owner}))
        self.check_unclaimed(owner)

    def delete(self, owner: str) -> None:
        """Delete what `owner` claimed; called again after it was cut off, it finishes.

        Deletes named files only: what somebody else put here stays, and so does the directory then.
        """
        self.check_unclaimed(owner)
        try:
            files = self.metadata().files
        except SavepointNotFound:
            files = ()
        except JobDirError:
            return
        # The metadata goes last: while it exists, the rest is still found.
        for file in files:
            self._store.delete(file.path)
        for key in (METADATA_KEY, CLAIM_KEY):
            self._store.delete(key)
        with contextlib.suppress(OSError):
            (self.path / STATE_FOLDER).rmdir()
        with contextlib.suppress(OSError):
            self.path.rmdir()


def copy_durably(source: Path, target: Path) -> None:
    """Copy a file and make its content durable; its name is not yet."""
    shutil.copyfile(source, target)
    with open(target, "rb") as file:
        os.fsync(file.fileno())
