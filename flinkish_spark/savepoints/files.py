"""The directory of a savepoint: its place, its files, and the job that owns them."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import unicodedata
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from flinkish_spark.core.errors import (
    ConfigError,
    CorruptObjectError,
    EnvironmentFault,
    FlinkishError,
    JobDirError,
    StoreError,
    UserError,
)
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.store import (
    CreateResult,
    LocalStore,
    ObjectMissing,
    SealedObjects,
    Store,
    make_directories,
)
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.protocol.durations import PathText
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.ids import CheckpointId, JobUuid
from flinkish_spark.protocol.restore import NonRestoredState, RestoreRules, UnpositionedSources
from flinkish_spark.protocol.savepoints import (
    STATE_ENDING,
    STATE_FOLDER,
    Claim,
    ClaimMode,
    SavepointMetadata,
    StateFile,
)
from flinkish_spark.state.savepoint_files import sha256_of


class SavepointNotFoundError(UserError):
    """There is no finished savepoint at the path."""


class SavepointDamagedError(CorruptObjectError):
    """A file of the savepoint is missing, torn or altered."""

    usual_advice = "copy the savepoint anew, or take another one"


class CheckpointNotRetainedError(UserError):
    """The job directory does not have the checkpoint, or its state, any more."""


class BootstrapError(UserError):
    """The operators, states or rows for a new savepoint do not fit together; nothing was written."""


METADATA_KEY = "savepoint.json"
CLAIM_KEY = "claimed.json"
#: Names of temporary files that a crash leaves.
_TEMPORARY = re.compile(r"\.(savepoint|claimed)\.json\.[0-9a-f]{32}\.tmp")


class SavepointDir:
    """The directory of a savepoint, finished or not.

        savepoint.json                    created last; without it there is no savepoint
        state/<operator uid>/<n>.parquet  rows of key group and state value
        claimed.json                      a job owns the files; deleted last

    All names in it are relative, so it can be moved and copied with any tool.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.shown, self.place = path, str(path), StoreSpec(str(path))
        self._store: Store = LocalStore(path)
        self._objects = SealedObjects(self._store, f"the savepoint {path}")

    def metadata(self) -> SavepointMetadata:
        try:
            return self._objects.read(METADATA_KEY, "savepoint", SavepointMetadata.from_json)
        except ObjectMissing:
            there = "there is no savepoint.json in it" if self.path.is_dir() else "there is no such directory"
            raise SavepointNotFoundError(
                f"there is no savepoint at {self.shown}",
                why=there + "; it is written last, when the savepoint is whole",
                what_to_do="give the directory that the trigger of the savepoint answered with",
                path=self.shown,
            ) from None

    def is_there(self, savepoint: str) -> bool:
        """Return whether this savepoint has the id `savepoint`; raises as :meth:`metadata` if damaged."""
        try:
            return self.metadata().savepoint == savepoint
        except SavepointNotFoundError:
            return False

    def check_files(self, files: Iterable[StateFile]) -> None:
        """Raise SavepointDamagedError unless all files exist with their sizes; does not read them."""
        for file in files:
            path = self._path_of(file)
            if path.stat().st_size != file.size_bytes:
                raise self._to_damage_error(
                    file, f"it has {path.stat().st_size} bytes instead of {file.size_bytes}"
                )

    def copy_to_place(self, files: Collection[StateFile], target: StoreSpec) -> None:
        """Copy files durably to a place and verify their checksums; raises as :meth:`copy_to_folder`."""
        if self.place.is_local and target.is_local:
            self.copy_to_folder(files, target.folder)
            return
        store = target.open()
        for file in files:
            data = self._read(file)
            if hashlib.sha256(data).hexdigest() != file.sha256:
                raise self._to_damage_error(file, "its checksum does not match")
            store.put(file.path, data)

    def _read(self, file: StateFile) -> bytes:
        return self._path_of(file).read_bytes()

    def copy_to_folder(self, files: Collection[StateFile], folder: Path) -> None:
        """Link or copy files to `folder` and verify their checksums."""
        for file in files:
            source, target = self._path_of(file), folder / file.path
            if sha256_of(source) != file.sha256:
                raise self._to_damage_error(file, "its checksum does not match")
            make_directories(target.parent)
            # Left by a restore that was cut off.
            target.unlink(missing_ok=True)
            try:
                os.link(source, target)
            except OSError:
                shutil.copyfile(source, target)
            # Also for a link: a tool that moved the savepoint here may not have synced the file. Its name is
            # not durable yet.
            with open(target, "rb") as content:
                os.fsync(content.fileno())

    def _path_of(self, file: StateFile) -> Path:
        path = self.path / file.path
        # The names in the metadata were checked, but a symbolic link could lead elsewhere.
        if path.is_symlink() or not path.resolve().is_relative_to(self.path.resolve()):
            raise self._to_damage_error(file, "it leads out of the savepoint")
        if not path.is_file():
            raise self._to_damage_error(file, "there is no such file")
        return path

    def _to_damage_error(self, file: StateFile, why: str) -> SavepointDamagedError:
        return SavepointDamagedError(
            f"the file {file.path} of the savepoint {self.shown} cannot be used",
            why=why,
            what_to_do="restore the savepoint from a backup, or use another one",
            path=self.shown,
            file=file.path,
        )

    def find_finished(
        self, job: JobUuid, checkpoint: CheckpointId, timeline: str = ""
    ) -> SavepointMetadata | None:
        """Return the savepoint if this checkpoint was exported here before; None without a savepoint."""
        try:
            known = self.metadata()
        except SavepointNotFoundError:
            return None
        is_other = bool(timeline and known.timeline and timeline != known.timeline)
        if is_other or (known.job_uuid, known.checkpoint) != (job, checkpoint):
            raise EnvironmentFault(
                f"there is another savepoint at {self.shown}",
                why=f"it is checkpoint {known.checkpoint} of "
                + ("a copy of this job's directory" if is_other else f"job '{known.job}'"),
                what_to_do="export to a directory of its own",
            )
        return known

    def prepare(self) -> None:
        """Make the directory durably, or check that it has no foreign files."""
        try:
            strange = next(_find_foreign_paths(self.path), None) if self.path.is_dir() else None
            is_claimed = os.path.lexists(self.path / CLAIM_KEY)
            if not strange and not is_claimed:
                make_directories(self.path)
        except OSError as error:
            raise StoreError.from_os_error(
                error,
                f"cannot write the savepoint {self.shown}",
                what_to_do="check that the disk is there, has room, and may be written by this user",
            ) from error
        if strange:
            raise self._to_not_empty_error(strange.relative_to(self.path))
        if is_claimed:
            raise EnvironmentFault(
                f"the directory {self.shown} holds {CLAIM_KEY}",
                why="a job owned the savepoint that was here, and may not be done with deleting it",
                what_to_do="export to a directory of its own, or delete this one if that job is gone",
            )

    def _to_not_empty_error(self, strange: object) -> EnvironmentFault:
        return EnvironmentFault(
            f"the directory {self.shown} is not empty",
            why=f"it holds {strange}, which is no part of a savepoint",
            what_to_do="export to a directory of its own",
        )

    def finish(self, metadata: SavepointMetadata) -> SavepointMetadata:
        """Create savepoint.json and remove files that it does not name; return the metadata in it."""
        data = seal("savepoint", metadata.to_json())
        found: SavepointMetadata | None = metadata
        if self._store.create_if_absent(METADATA_KEY, data) is not CreateResult.CREATED:
            # Another export of the same checkpoint was faster; its metadata does not name our files.
            found = self.find_finished(metadata.job_uuid, metadata.checkpoint, metadata.timeline)
        assert found is not None
        self._delete_others({file.path for file in found.files})
        return found

    def _delete_others(self, named: Collection[str]) -> None:
        for path in sorted(self.path.glob(f"{STATE_FOLDER}/*/*{STATE_ENDING}")):
            if path.relative_to(self.path).as_posix() not in named:
                path.unlink(missing_ok=True)
                with contextlib.suppress(OSError):
                    path.parent.rmdir()

    def find_claim(self, savepoint: str) -> Claim | None:
        claim = self._objects.optional(CLAIM_KEY, "claim", Claim.from_json)
        is_of_this = claim is not None and (claim.savepoint, claim.path) == (savepoint, self._own_place())
        return claim if is_of_this else None

    def check_unclaimed(self, job: JobUuid | None) -> None:
        claim = self.find_claim(self.metadata().savepoint)
        if claim is not None and claim.job != job:
            raise UserError(
                f"the savepoint {self.shown} belongs to another job",
                why=f"the job in {claim.owner} claimed it, and deletes it when it needs it no more",
                what_to_do="take a savepoint of that job, and restore with ClaimMode.NO_CLAIM next time; "
                f"or delete {CLAIM_KEY} if that job is gone for good",
                owner=claim.owner,
            )

    def claim(self, job: JobUuid, owner: str) -> None:
        """Make a job the owner of the files; of several jobs exactly one can."""
        self.check_unclaimed(job)
        name = self.metadata().savepoint
        data = seal("claim", Claim(name, self._own_place(), job, owner).to_json())
        is_new = self._store.create_if_absent(CLAIM_KEY, data) is CreateResult.CREATED
        if not is_new and self.find_claim(name) is None:
            # The claim was copied with the directory. Two jobs may replace it at once; the last one wins.
            self._store.put(CLAIM_KEY, data)
        self.check_unclaimed(job)

    def delete(self, job: JobUuid, savepoint: str) -> None:
        """Delete a savepoint that the job claimed; a second call finishes one that was cut off.

        Foreign files stay, and so does the directory then.
        """
        claim = self.find_claim(savepoint)
        # The same directory may hold a later savepoint by now.
        if claim is None or claim.job != job:
            return
        try:
            metadata = self.metadata()
        except SavepointNotFoundError:
            # An earlier call has deleted everything but the claim.
            files: tuple[StateFile, ...] = ()
        except JobDirError:
            return
        else:
            if metadata.savepoint != savepoint:
                return
            files = metadata.files
        # The metadata goes after the files that it names, or they would not be found again; the claim goes
        # last: while it exists, no other savepoint is written here.
        for file in files:
            self._store.delete(file.path)
        for key in (METADATA_KEY, CLAIM_KEY):
            self._store.delete(key)
        with contextlib.suppress(OSError):
            (self.path / STATE_FOLDER).rmdir()
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def _own_place(self) -> str:
        return str(self.path.resolve())


class SavepointInBucket(SavepointDir):
    """The directory of a savepoint in a bucket; ids and claims are as on a disk."""

    def __init__(self, place: StoreSpec) -> None:
        self.place, self.shown = place, place.url
        # Never used; the directory is in the bucket.
        self.path = Path("/nonexistent")
        self._store = self._bucket = place.open_bucket()
        self._objects = SealedObjects(self._store, f"the savepoint {place.url}")

    def check_files(self, files: Iterable[StateFile]) -> None:
        there = self._bucket.sizes_below(STATE_FOLDER)
        for file in files:
            found = there.get(file.path.removeprefix(f"{STATE_FOLDER}/"))
            if found != file.size_bytes:
                why = "there is no such file" if found is None else f"it has {found} bytes"
                raise self._to_damage_error(file, f"{why} instead of {file.size_bytes} bytes")

    def _read(self, file: StateFile) -> bytes:
        try:
            return self._store.read(file.path)
        except ObjectMissing:
            raise self._to_damage_error(file, "there is no such file") from None

    def prepare(self) -> None:
        """Check that there are no foreign files, and that the bucket is writable."""
        # On HDFS a kill may leave a hidden file.
        there = [name for name in self._bucket.sizes_below("") if not _TEMPORARY.fullmatch(name)]
        strange = [n for n in there if n != METADATA_KEY and not n.startswith(f"{STATE_FOLDER}/")]
        if strange:
            raise self._to_not_empty_error(strange[0])
        probe = f".{METADATA_KEY}.{uuid.uuid4().hex}.tmp"
        self._store.put(probe, b"?")
        self._store.delete(probe)

    def _delete_others(self, named: Collection[str]) -> None:
        there = (f"{STATE_FOLDER}/{name}" for name in self._bucket.sizes_below(STATE_FOLDER))
        self._bucket.delete_all([key for key in there if key not in named])

    def _own_place(self) -> str:
        return self.place.url


def place_of(path: str | Path, store_options: Mapping[str, str] | None) -> StoreSpec:
    """Return the place for a path, absolute or not, or the URL of a bucket."""
    text = str(path).removeprefix("file://")
    if "://" in text or store_options:
        return StoreSpec.parse(text, store_options or {})
    return StoreSpec(str(Path(text).absolute()))


def savepoint_at(place: StoreSpec) -> SavepointDir:
    return SavepointDir(place.folder) if place.is_local else SavepointInBucket(place)


def target_place(target: str, job_dir: StoreSpec) -> StoreSpec:
    """Return the place of a new savepoint; in the job directory's bucket, with the options of that."""
    if "://" not in target:
        return StoreSpec(target)
    place = StoreSpec.parse(target)
    is_same = not job_dir.is_local and _bucket_of(place) == _bucket_of(job_dir)
    return StoreSpec.parse(target, dict(job_dir.options)) if is_same else place


def _bucket_of(place: StoreSpec) -> str:
    return "/".join(place.url.split("/")[:3])


def _find_foreign_paths(root: Path) -> Iterator[Path]:
    """Yield paths in a savepoint's directory that no export wrote; symbolic links are not followed."""
    for path in sorted(root.iterdir()):
        if path.name == STATE_FOLDER and path.is_dir() and not path.is_symlink():
            for folder in sorted(path.iterdir()):
                if folder.is_symlink() or not folder.is_dir():
                    yield folder
                    continue
                for one in sorted(folder.iterdir()):
                    if one.suffix != STATE_ENDING or not one.is_file() or one.is_symlink():
                        yield one
        elif path.name not in (METADATA_KEY, CLAIM_KEY) and not _TEMPORARY.fullmatch(path.name):
            yield path


#: Longest path and longest name in it, in bytes, with room for ``/state/<uid>/<name>.parquet``.
_LONGEST_PATH = 3_500
_LONGEST_NAME = 255
_ELSEWHERE = "give another directory"


def why_no_savepoint_at(target: str, job_dir: StoreSpec) -> str:
    """Return why no savepoint can be written to a directory, and what to do; empty if it can."""
    try:
        check_target(target_place(target, job_dir), lambda place: check_outside(place, job_dir))
    except FlinkishError as error:
        return str(error)
    return ""


def check_target(target: StoreSpec, check_place: Callable[[StoreSpec], None]) -> None:
    """Refuse a place to which no savepoint can be written; on a disk, make the directory."""
    path, is_path = Path(target.url), "://" not in target.url
    try:
        if is_path:
            _check_text(target.url)
        check_place(target)
        if is_path and path.exists() and not path.is_dir():
            raise _to_target_error(target.url, "it is a file", "give a directory, which may be new")
        directory = savepoint_at(target)
        _refuse_another(target.url, directory)
        directory.prepare()
        if is_path:
            _try_to_write(path)
    except (OSError, ValueError) as error:
        what_to_do = "check that this user may write it, or " + _ELSEWHERE
        raise _to_target_error(target.url, str(error), what_to_do) from error


def check_apart(target: StoreSpec, origin: StoreSpec) -> None:
    if any(compare_places(target, origin)):
        why = f"it is inside or around the savepoint {origin.url}, from which the new one is made"
        raise _to_target_error(target.url, why, _ELSEWHERE)


def check_outside(target: StoreSpec, job_dir: StoreSpec) -> None:
    """Refuse a target inside or around the job directory, also through symbolic links."""
    is_in, is_around = compare_places(target, job_dir)
    shown = os.path.realpath(job_dir.folder) if job_dir.is_local else job_dir.url
    if is_in:
        raise _to_target_error(
            target.url,
            f"it is in the job directory {shown}, and a savepoint has to outlive that",
            "give a directory outside of it",
        )
    if is_around:
        raise _to_target_error(target.url, f"the job directory {shown} is in it", "give another directory")


def compare_places(one: StoreSpec, other: StoreSpec) -> tuple[bool, bool]:
    """Return whether `one` is equal to or inside `other`, and whether `other` is inside `one`."""
    if one.is_local and other.is_local:
        # Not Path.resolve, which raises for a cycle of links.
        place, root = Path(os.path.realpath(one.folder)), Path(os.path.realpath(other.folder))
        return _is_within(place, root), _is_within(root, place)
    return f"{one.url}/".startswith(f"{other.url}/"), f"{other.url}/".startswith(f"{one.url}/")


def _is_within(path: Path, folder: Path) -> bool:
    """Return whether a resolved path is in a resolved folder; a directory may have two names."""

    def identity(one: Path) -> tuple[int, int] | None:
        with contextlib.suppress(OSError):
            return (found := one.stat()).st_dev, found.st_ino
        return None

    known = identity(folder)
    return path.is_relative_to(folder) or (
        known is not None and any(identity(one) == known for one in (path, *path.parents))
    )


def _check_text(target: str) -> None:
    if any(unicodedata.category(letter) in ("Cc", "Cs") for letter in target):
        raise _to_target_error(target, "there are control characters in it", "give one without them")
    if not target.startswith("/"):
        raise _to_target_error(
            target,
            "half of the code runs in other processes, with other working directories",
            "give an absolute path",
        )
    longest = max(len(name.encode()) for name in target.split("/"))
    if len(target.encode()) > _LONGEST_PATH or longest > _LONGEST_NAME:
        raise _to_target_error(
            target,
            f"it is too long: a path has room for {_LONGEST_PATH:,} bytes, a name in it for {_LONGEST_NAME}",
            "give a shorter path",
        )


def _refuse_another(target: str, directory: SavepointDir) -> None:
    if directory.place.is_local and not os.path.lexists(directory.path / METADATA_KEY):
        return
    try:
        known = directory.metadata()
        what = f"checkpoint {known.checkpoint} of job '{known.job}'"
    except (CorruptObjectError, JobDirError):
        what = "one that cannot be read"
    except SavepointNotFoundError:
        if not directory.place.is_local:
            return
        what = "a link that leads nowhere"
    raise _to_target_error(target, f"another savepoint is there: {what}", _ELSEWHERE)


def _try_to_write(path: Path) -> None:
    # Named like a temporary file that a crash left, which a later export ignores.
    probe = path / f".{METADATA_KEY}.{uuid.uuid4().hex}.tmp"
    try:
        with open(probe, "xb") as file:
            file.write(b"?")
    finally:
        probe.unlink(missing_ok=True)


def _to_target_error(target: str, why: str, what_to_do: str) -> EnvironmentFault:
    # The target may be any text: quoted and shortened.
    shown = repr(target if len(target) <= 200 else f"{target[:200]}...")
    return EnvironmentFault(f"no savepoint can be written to {shown}", why=why, what_to_do=what_to_do)


@dataclass(frozen=True)
class RestoreSettings:
    """Start a new job from a savepoint.

    Used at the first start of a job directory. A later start with the same savepoint goes on from the job's
    own checkpoints; with another savepoint it is refused.

    Parameters
    ----------
    path
        The savepoint's directory: an absolute path, as a str, or a URL like ``s3://bucket/savepoints/7``.
    claim
        Whether the job owns the savepoint's files afterwards.
    non_restored
        Whether state that no operator of the job takes is dropped or refused.
    unpositioned
        Whether sources that cannot be positioned begin where they are or are refused.
    store_options
        Options of the savepoint's bucket; see `StreamExecutionEnvironment`.

    Examples
    --------
    >>> RestoreSettings("/savepoints/orders-17").claim.name
    'NO_CLAIM'
    """

    path: PathText
    claim: ClaimMode = ClaimMode.NO_CLAIM
    non_restored: NonRestoredState = NonRestoredState.REFUSE
    unpositioned: UnpositionedSources = UnpositionedSources.REFUSE
    store_options: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        check_fields(self, path='give RestoreSettings("/absolute/path")')
        if "://" in self.path.removeprefix("file://"):
            _ = self.place
        elif not Path(self.path.removeprefix("file://")).is_absolute():
            raise ConfigError(
                f"the savepoint {self.path!r} cannot be used",
                why="half of the code runs in other processes, with other working directories",
                what_to_do="give an absolute path",
            )

    @property
    def folder(self) -> Path:
        """Return the path without the scheme of a local file; raise ConfigError if it is in a bucket."""
        return self.place.folder

    @property
    def place(self) -> StoreSpec:
        """Return the savepoint's place; raise ConfigError if the path or URL is no place of a store."""
        return place_of(self.path, self.store_options)

    @property
    def rules(self) -> RestoreRules:
        """Return the user's rules for state and sources that do not fit."""
        return RestoreRules(self.non_restored, self.unpositioned)
