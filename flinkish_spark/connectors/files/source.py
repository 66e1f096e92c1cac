"""The file source: reads the files of a folder, once or continuously."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from fnmatch import fnmatch
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pyspark.sql import types as T

from flinkish_spark.connectors.files.input_formats import FilePart, InputFormat, to_printable
from flinkish_spark.connectors.rates import RateLimit
from flinkish_spark.connectors.split_records import cast_to_field
from flinkish_spark.connectors.splits import SourceUnavailable, SplitSource
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.core.clock import wall_ms
from flinkish_spark.core.errors import ConfigError, FlinkishError, InputLostError
from flinkish_spark.core.fields import Range, TextPattern, check_arguments
from flinkish_spark.core.iterators import elements_of
from flinkish_spark.core.store import SealedObjects
from flinkish_spark.core.store_spec import StoreSpec
from flinkish_spark.core.validation import to_path
from flinkish_spark.protocol.choices import Choice
from flinkish_spark.protocol.codec import Form, StoredRow
from flinkish_spark.protocol.durations import Milliseconds
from flinkish_spark.protocol.envelope import seal
from flinkish_spark.protocol.limits import MOST_MS, UNLIMITED, Limit, NoLimit
from flinkish_spark.types.arrow_types import arrow_schema
from flinkish_spark.types.schemas import output_schema

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

    from flinkish_spark.core.job_dir import JobDir
    from flinkish_spark.core.offset_log import LoggedOffsets


_PARTS, _PAGES, _FOLDS, _KIND = "files", "pages", "folds", "files"
#: Number of parts in a page; pages are folded when they hold a fourth of the files of the fold. So each file
#: is written a few times, and few objects are read at a start, however long the list becomes.
_PARTS_PER_FOLD = 1_000
#: In one look, how many known files are compared, and how many entries are listed in folders that seem
#: unchanged. Files and folders take turns.
_COMPARED, _LISTED = 1_000, 10_000
_LONG_LOOK_S = 0.5
#: A folder that changed within this time may change again without a new modification time.
_SETTLED_MS = 60_000


#: Entry beside a file's partition values that names the part of the file. No field has such a name.
_PART = "flinkish:part"


def _text_of(path: str) -> str:
    """Return a file name for JSON: one that is not UTF-8 as hex, after a character that no name has."""
    return path if to_printable(path) == path else "\0" + os.fsencode(path).hex()


def _path_of(text: str) -> str:
    return os.fsdecode(bytes.fromhex(text[1:])) if text.startswith("\0") else text


@dataclass(frozen=True, slots=True)
class FoundFile(StoredRow):
    #: Relative to the folder of the input.
    path: Annotated[str, Form(_text_of, _path_of)]
    size: int
    modified_ns: int
    #: Number of records; None if that is not known.
    rows: int | None
    #: Partition values, which the file does not contain, as texts by field.
    partition: Mapping[str, str | None] = field(default_factory=dict)

    @classmethod
    def parts_of(
        cls, path: str, stat: Any, parts: Sequence[FilePart], values: Mapping[str, str | None]
    ) -> list[Self]:
        known = path, stat.st_size, stat.st_mtime_ns
        found = []
        for one in parts:
            which = {_PART: f"{one.begin} {one.end} {one.bytes} {one.first}"} if one.end is not None else {}
            found.append(cls(*known, one.rows, {**values, **which}))
        return found

    @property
    def part(self) -> FilePart:
        if (text := self.partition.get(_PART)) is None:
            return FilePart(rows=self.rows, bytes=self.size)
        begin, end, size, first = map(int, text.split())
        return FilePart(begin, end, self.rows, size, first)


class FileList:
    """The files that a source has found, in the order of finding; durable before any is read."""

    # A position of the source is a number of files in this list, so a file keeps its place for ever. A large
    # file has several consecutive entries: it is found once, so its parts never change. The list is stored in
    # parts, each created once: another process that lists the same folder finds the part taken, and goes on
    # from there. After `_PARTS_PER_FOLD` parts they become a page, or with older pages a fold: one object,
    # without the files that no checkpoint needs. The ends of pages and folds depend on the parts only, so all
    # processes end them at the same places, and each finds the parts after another one's page.

    def __init__(self, place: StoreSpec) -> None:
        self._place = place.url
        self._store = place.open()
        self._objects = SealedObjects(self._store, place.url)
        self._files: list[FoundFile] = []
        #: Number of files that were dropped from the front.
        self._dropped = 0
        #: Size and time of each known file, also of dropped ones, by its path.
        self._known: dict[str, tuple[int, int]] = {}
        #: Ends of the parts that were read since the last page or fold; None before the store was read.
        self._ends: list[int] | None = None
        #: End of the newest page, and of the newest fold.
        self._paged = self._folded = 0
        self._folders = Folders()
        #: Files that are still to be compared in this turn.
        self._turn: Iterator[str] = iter(())
        #: Whether the list will not grow any more.
        self.is_closed = False

    def __len__(self) -> int:
        return self._dropped + len(self._files)

    def __getitem__(self, index: int) -> FoundFile:
        assert index >= self._dropped, f"file {index} was dropped: no checkpoint needed it"
        return self._files[index - self._dropped]

    def read(self) -> FileList:
        began = len(self)
        if self._ends is None:
            self._read_anew()
        elif self._read_parts() and max(self._starts(), default=0) > began:
            # This order matters: the part is stored, and then pages and folds are listed. Others may be
            # ahead and may have deleted their part: then this one is in its place, where they never read it.
            self._read_anew()
        return self

    def _read_anew(self) -> None:
        starts = None
        # Again, if another process has folded parts and deleted them meanwhile.
        while starts != (there := self._starts()):
            starts = there
            self._take({"dropped": 0, "files": [], "read": {}, "is_closed": False})
            while folds := self._store.list(_FOLDS):
                if (stored := self._objects.optional(max(folds), _KIND, dict)) is not None:
                    self._take(stored)
                    break
            self._folded = self._paged = len(self)
            self._ends = []
            while True:
                while self._read_part(_PAGES):
                    self._paged, self._ends = len(self), []
                if not self._read_parts():
                    break
        if max(there, default=0) > len(self):
            raise InputLostError(
                f"the list of found files in {self._place} has a gap after {len(self)} files",
                why="a part of it was deleted, so it is not known which files were read",
                what_to_do="go back to a savepoint, or start a new job with a new job_dir",
            )

    def _starts(self) -> tuple[int, ...]:
        return tuple(sorted(_number(key) for kind in (_PAGES, _FOLDS) for key in self._store.list(kind)))

    def _read_parts(self) -> bool:
        began = len(self)
        while self._read_part(_PARTS):
            assert self._ends is not None
            self._ends.append(len(self))
        return len(self) > began

    def _read_part(self, kind: str) -> bool:
        part = None if self.is_closed else self._objects.optional(_key(kind, len(self)), _KIND, dict)
        if part is None or not (part["files"] or part["is_last"]):
            return False
        found = [FoundFile.from_json(one) for one in part["files"]]
        self._files += found
        self._known.update((one.path, (one.size, one.modified_ns)) for one in found)
        self.is_closed = bool(part["is_last"])
        return True

    def add(self, found: Sequence[FoundFile], is_last: bool) -> None:
        """Store a part, unless another process has stored it, and read the stored one."""
        if found or is_last:
            body = {"files": [one.to_json() for one in found], "is_last": is_last}
            self._store.create_if_absent(_key(_PARTS, len(self)), seal(_KIND, body))
        self.read()
        # This order matters: a folder counts as seen when its files are in the list.
        if all(one.path in self._known for one in found):
            self._folders.keep()

    def fold(self, needed: Callable[[], int], may_come_again: Callable[[str], bool]) -> None:
        """Merge many parts into a page, and many pages into a fold without files that no checkpoint needs."""
        while len(self._ends or ()) >= _PARTS_PER_FOLD and not self.is_closed:
            assert self._ends is not None
            # Not at the end of this list: it may have grown while another process's list ended there.
            end = self._ends[_PARTS_PER_FOLD - 1]
            if end - self._folded < len(self._known) // 4:
                files = self._files[self._paged - self._dropped : end - self._dropped]
                body = {"files": [one.to_json() for one in files], "is_last": False}
                # This order matters, too; and the parts of a page stay until the next one is there.
                self._store.create_if_absent(_key(_PAGES, self._paged), seal(_KIND, body))
                self._delete_before(_PARTS, self._paged)
            else:
                self._add_fold(end, needed(), may_come_again)
            self._paged, self._ends = end, self._ends[_PARTS_PER_FOLD:]

    def _add_fold(self, end: int, needed: int, may_come_again: Callable[[str], bool]) -> None:
        # The last file stays: sources go on after it.
        count = max(0, min(needed, end - 1) - self._dropped)
        self._files, self._dropped = self._files[count:], self._dropped + count
        kept = {one.path for one in self._files}
        self._known = {path: one for path, one in self._known.items() if path in kept or may_come_again(path)}
        older = sorted(self._store.list(_FOLDS))
        # This order matters: parts are deleted when a fold has their files. Parts since the fold before stay
        # for another scan of this job, whose list may end among them.
        self._store.create_if_absent(_key(_FOLDS, end), seal(_KIND, self._store_up_to(end)))
        self._folded = end
        if older:
            newest = _number(older[-1])
            for kind in (_PARTS, _PAGES, _FOLDS):
                self._delete_before(kind, newest)

    def _delete_before(self, kind: str, end: int) -> None:
        for key in self._store.list(kind):
            if key < _key(kind, end):
                self._store.delete(key)

    def to_json(self) -> dict[str, Any]:
        return self._store_up_to(len(self))

    def _store_up_to(self, end: int) -> dict[str, Any]:
        files = [one.to_json() for one in self._files[: end - self._dropped]]
        kept = {one.path for one in self._files}
        read = {_text_of(path): list(one) for path, one in self._known.items() if path not in kept}
        return {"dropped": self._dropped, "files": files, "read": read, "is_closed": self.is_closed}

    def restore(self, stored: Mapping[str, Any]) -> None:
        self._take(stored)
        self._store.create_if_absent(_key(_FOLDS, len(self)), seal(_KIND, self.to_json()))

    def _take(self, stored: Mapping[str, Any]) -> None:
        self._dropped, self.is_closed = int(stored["dropped"]), bool(stored["is_closed"])
        self._files = [FoundFile.from_json(one) for one in stored["files"]]
        self._known = {_path_of(path): (size, at) for path, (size, at) in stored["read"].items()}
        self._known |= {one.path: (one.size, one.modified_ns) for one in self._files}

    def look(self, root: Path, pattern: str, format: InputFormat) -> list[FoundFile]:
        found, prefix = list[FoundFile](), os.path.join(root, "")
        for entry in self._folders.entries(str(root), pattern):
            name = entry.path[len(prefix) :]
            if name in self._known:
                continue
            try:
                stat = entry.stat()
                with naming(entry.path):
                    found += FoundFile.parts_of(name, stat, format.parts(entry.path), {})
            except FileNotFoundError:
                continue  # Gone before it was ours.
        self._compare(prefix)
        return sorted(found, key=lambda one: (one.modified_ns, one.path))

    def _compare(self, prefix: str) -> None:
        """Refuse a file that has changed: records that were added to it would be lost silently."""
        names = [*islice(self._turn, _COMPARED)]
        if len(names) < _COMPARED:
            self._turn = iter(tuple(self._known))
            names += islice(self._turn, _COMPARED - len(names))
        for name in names:
            known = self._known.get(name)
            # A missing file may have been deleted after it was read.
            with suppress(FileNotFoundError):
                stat = os.stat(prefix + name)
                if known is not None and known != (stat.st_size, stat.st_mtime_ns):
                    raise InputLostError(
                        f"the file {to_printable(prefix + name)} has changed since it was found",
                        why="a file is read once, so new or replaced records in it would not be read",
                        what_to_do="put it back as it was, with its time, or delete it if it has been read; "
                        "write new records to another file. Or start a new job with a new job_dir",
                    )


def _key(kind: str, files: int) -> str:
    return f"{kind}/{files:012d}.json"


def _number(key: str) -> int:
    return int(key.rpartition("/")[2].removesuffix(".json"))


@dataclass(slots=True)
class _FolderListing:
    #: Time and inode, which differ if the folder has changed or was replaced.
    mark: tuple[int, int]
    entries: int
    folders: list[str]
    #: Number of the look in which it was listed.
    at: int


class Folders:
    """Lists a folder and its subfolders repeatedly; skips most that have not changed since the last time."""

    # A folder's time tells when a name was added. Since some file systems do not keep it, and clocks differ,
    # each folder is listed again in its turn.
    def __init__(self) -> None:
        self._known: dict[str, _FolderListing] = {}
        self._fresh: dict[str, _FolderListing] = {}
        self._looks = 0

    def keep(self) -> None:
        """Remember the folders of the newest look, since all its files are in the list."""
        self._known |= self._fresh

    def entries(self, root: str, pattern: str) -> Iterator[os.DirEntry[str]]:
        """Yield the files of new and changed folders; links to folders are not followed."""
        self._looks, self._fresh = self._looks + 1, {}
        due, folders, before = self._due(), [root], (wall_ms() - _SETTLED_MS) * 1_000_000
        while folders:
            folder = folders.pop()
            known = self._known.get(folder)
            try:
                stat = os.stat(folder)
                mark = (stat.st_mtime_ns, stat.st_ino)
                is_settled = known is not None and known.mark == mark and stat.st_mtime_ns < before
                if known is not None and is_settled and folder not in due:
                    folders += known.folders
                    continue
                with os.scandir(folder) as found:
                    entries = [one for one in found if one.name[0] not in "._"]
            except FileNotFoundError:
                # Any other error is raised: without the folder, it would count as an empty one.
                if folder == root:
                    raise
                self._known.pop(folder, None)
                continue  # Gone before it was ours.
            within = [one.path for one in entries if one.is_dir() and not one.is_symlink()]
            self._fresh[folder] = _FolderListing(mark, len(entries), within, self._looks)
            folders += within
            yield from (one for one in entries if not one.is_dir() and fnmatch(one.name, pattern))

    def _due(self) -> set[str]:
        """Return the folders that have not been listed for the longest time."""
        due, left = set(), _LISTED
        for folder, listed in sorted(self._known.items(), key=lambda one: one[1].at):
            due.add(folder)
            left -= listed.entries + 1
            if left < 0:
                break
        return due


class Discovery(Choice):
    """Which files a source reads."""

    #: Files that exist when the job starts for the first time; the job ends after them.
    ONCE = "ONCE"
    #: Those, and all that appear while the job exists.
    CONTINUOUS = "CONTINUOUS"


class FileSource(SplitSource):
    """Reads the files of a folder and of folders in it, each once and whole.

    A file must appear at once, by a rename, and never change: one that has changed since it was found fails
    the job. Files are not read if their names, or those of their folders, begin with ``_`` or ``.``. Files
    are read in the order of finding; files found together, the oldest first. A large file of Parquet, JSON
    lines or text is read as several parts in order: ranges of row groups or of lines, of at least 64 MiB.

    Parameters
    ----------
    path
        Absolute path of the folder, which driver and executors share. It must exist.
    format
        ParquetFiles(), JsonLines(), CsvFiles(...) or TextLines().
    schema
        Fields of the records.
    discovery
        Whether files that come later are read.
    pattern
        Pattern of file names, like ``"*.parquet"``.
    splits
        Number of splits that are read at the same time; files are dealt to them in turns.
    discover_every_ms
        How often the folder is listed.
    max_files_per_batch, max_bytes_per_batch
        Most files of each split in one micro-batch, and most bytes on disk; at least one file, or one part of
        a large one.
    rate
        Most records; a micro-batch takes whole files or parts, so at least one. The number of records is
        known of Parquet files only; any other file counts as the whole limit.

    Raises
    ------
    ConfigError, SchemaError
        An argument cannot be used.

    Examples
    --------
    >>> from flinkish_spark.connectors.files.input_formats import ParquetFiles
    >>> history = FileSource("/data/orders", ParquetFiles(), "user STRING, amount LONG")
    >>> history.is_bounded
    True
    """

    kind = "files"

    @check_arguments(
        "schema",
        path='give a folder: "/data/orders"',
        format="give ParquetFiles(), JsonLines(), CsvFiles(...) or TextLines()",
        pattern='give a pattern of names: "*.csv"',
        rate="give RateLimit(records_per_second=..., records_per_batch=...)",
    )
    def __init__(
        self,
        path: str | os.PathLike[str],
        format: InputFormat,
        schema: str | T.StructType,
        *,
        discovery: Discovery = Discovery.ONCE,
        pattern: Annotated[str, TextPattern("[^/]+", "a pattern of names of files")] = "*",
        splits: Annotated[int, Range(1, 10_000)] = 1,
        discover_every_ms: Annotated[Milliseconds, Range(1, MOST_MS)] = 1_000,
        max_files_per_batch: Annotated[int, Range(1)] = 1_000,
        max_bytes_per_batch: Annotated[Limit, Range(1)] = UNLIMITED,
        rate: RateLimit | None = None,
    ) -> None:
        self.path = self._check_path(path)
        self.format, self.rate = format, RateLimit() if rate is None else rate
        self.schema = output_schema(schema, "a file source")
        self.format.check(arrow_schema(self.schema))
        self._discovery, self._pattern, self._parts = discovery, pattern, splits
        self._every_s, self._most_files = discover_every_ms / 1_000, max_files_per_batch
        self._most_bytes = max_bytes_per_batch
        self._list: FileList | None = None
        self._look_at = float("-inf")

    def _check_path(self, path: str | os.PathLike[str]) -> str:
        text = to_path(path)
        folder = text.removeprefix("file://")
        if not os.path.isabs(folder) or "\0" in text:
            raise ConfigError(f"path is {path!r}", what_to_do='give an absolute path: "/data/orders"')
        return folder

    def _place(self, name: str = "") -> Any:
        """Return the folder, or a file in it, with the methods of `Path`."""
        return Path(self.path, name)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_list": None, "_look_at": float("-inf")}

    @property
    def is_bounded(self) -> bool:  # type: ignore[override]
        """True if files that appear later are not read."""
        return self._discovery is Discovery.ONCE

    # Between micro-batches:
    def splits(self) -> Sequence[str]:
        """Return the numbers of the splits."""
        return [str(number) for number in range(self._parts)]

    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return the file up to which a split can be read."""
        found = self._files()
        most = min(self._count(len(found), split), start + self._most_files)
        end, records, size_bytes = start, 0, 0
        while end < most and (limit is None or records < limit):
            file = found[self._index(split, end)]
            size_bytes += file.part.bytes
            # Whole files, or parts of a large one: a file that is too big is a micro-batch of its own.
            if end > start and not isinstance(self._most_bytes, NoLimit) and size_bytes > self._most_bytes:
                break
            if limit is not None:
                records += limit if file.rows is None else file.rows
            end += 1
        return end

    def available(self, split: str, start: int | None) -> int:
        """Return how many files a part has now."""
        return self._count(len(self._files()), split)

    def end(self, split: str) -> int | None:
        """Return the number of files of a split; None while more may come."""
        found = self._files()
        return self._count(len(found), split) if found.is_closed else None

    def records_between(self, split: str, start: int, end: int) -> int | None:
        """Return the number of records of some files; None if it is not known of all."""
        found = self._files()
        rows = [found[self._index(split, at)].rows for at in range(start, end)]
        return sum(count for count in rows if count is not None) if None not in rows else None

    def piece_facts(self, split: str, start: int, end: int) -> list[Any]:
        """Return the files of a piece, so that its task need not read the whole list."""
        if self._list is None:
            self._list = FileList(self.job_store)
        found = self._list.read()
        return [
            self._prepare_for_task(found[self._index(split, place)]).to_json() for place in range(start, end)
        ]

    def _prepare_for_task(self, file: FoundFile) -> FoundFile:
        """Return a file with the facts that its task needs."""
        return file

    def _files(self) -> FileList:
        if self._list is None:
            self._list = FileList(self.job_store).read()
        if not self._list.is_closed and time.monotonic() >= self._look_at:
            began = time.monotonic()
            self._list.add(*self._look(self._list.read()))
            self._list.fold(self._first_needed, self._may_come_again)
            took = time.monotonic() - began
            # Listing a large folder takes at most a fifth of the time.
            self._look_at = began + max(self._every_s, 5 * took if took > _LONG_LOOK_S else 0)
        return self._list

    def _first_needed(self) -> int:
        needed = self._find_needed_offsets()
        return min(self._index(split, needed.get(split, 0)) for split in self.splits())

    def _may_come_again(self, path: str) -> bool:
        """Return whether a file exists, or may: an empty folder may be one that is not mounted."""
        there = Path(self.path, path)
        if there.exists():
            return True
        # Read one entry only: a whole listing for each missing file would take minutes.
        with os.scandir(next(one for one in there.parents if one.exists())) as entries:
            return next(entries, None) is None

    def _look(self, known: FileList) -> tuple[Sequence[FoundFile], bool]:
        """Return the files that are not in the list yet, and whether they are the last ones."""
        try:
            return known.look(Path(self.path), self._pattern, self.format), self.is_bounded
        except FileNotFoundError as error:
            # It existed at the start. Its file system may be away for a time, so the job waits.
            raise SourceUnavailable(
                f"the folder {self.path} of source '{self._fs_uid}' cannot be listed",
                why=f"{type(error).__name__}: {error}",
            ) from error

    def _index(self, split: str, place: int) -> int:
        return place * self._parts + int(split)

    def _count(self, files: int, split: str) -> int:
        return max(0, -(-(files - int(split)) // self._parts))

    # In a task:
    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the records of some files."""
        import pyarrow as pa

        schema = arrow_schema(self.record_type)
        found = self._fs_piece_facts or self.piece_facts(split, start, end)
        for file in map(FoundFile.from_json, found):
            path = self._check_unchanged(file)
            with naming(path):
                for batch in elements_of(self._records(file, path, schema)):
                    # In this block, so that an error names the file.
                    columns = [cast_to_field(batch.column(field.name), field) for field in schema]
                    yield pa.RecordBatch.from_arrays(columns, names=schema.names)
            # It may have been replaced while it was read.
            self._check_unchanged(file)

    def _records(self, file: FoundFile, path: str, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return self.format.batches_between(path, schema, file.part.begin, file.part.end)

    def _check_unchanged(self, file: FoundFile) -> str:
        path = os.path.join(self.path, file.path)
        try:
            stat = self._place(file.path).stat()
            now = (stat.st_size, stat.st_mtime_ns)
        except FileNotFoundError:
            now = None
        if now == (file.size, file.modified_ns):
            return path
        raise InputLostError(
            f"the file {to_printable(path)} "
            + ("is gone" if now is None else "has changed since it was found"),
            why="a checkpoint that has not come yet, or may be gone back to, needs it as it was",
            what_to_do="restore the file, with its time; or start a new job with a new job_dir",
        )

    # On the driver:
    def preflight(self, spark: SparkSession, job_dir: JobDir, uid: str) -> None:
        """Refuse a folder that does not exist."""
        super().preflight(spark, job_dir, uid)
        if not self._place().is_dir():
            problem, what_to_do = "is not there", "create it, or correct it"
            if self._place().is_file():
                problem = "is a file, and a FileSource reads a folder"
                what_to_do = f"give the folder, and the file as pattern={os.path.basename(self.path)!r}"
            raise ConfigError(f"the path {self.path} of source '{uid}' {problem}", what_to_do=what_to_do)

    def check_input(self, job_dir: JobDir, uid: str, position: LoggedOffsets | None) -> None:
        """Restore the list of files from the savepoint, if the job was restored from one."""
        super().check_input(job_dir, uid, position)
        restored = job_dir.find_fact(_fact(uid))
        if restored is not None and not len(FileList(self.job_store).read()):
            FileList(self.job_store).restore(restored)

    def identity(self, job_dir: JobDir, uid: str) -> Mapping[str, Any]:
        """Return the list, too: a position is a number of files in it."""
        listed = FileList(self.job_store).read().to_json()
        return {**super().identity(job_dir, uid), _fact(uid): listed}

    def datasets(self) -> tuple[Dataset, ...]:
        """Return the folder."""
        return (Dataset.from_path(self.path),)

    def fingerprint(self) -> Mapping[str, Any]:
        """Return the settings that the list of files depends on."""
        return {"path": self.path, "pattern": self._pattern, "splits": self._parts, "end": self.is_bounded}


@contextmanager
def naming(path: str) -> Iterator[None]:
    name = to_printable(path)
    try:
        yield
    except FlinkishError:
        raise
    except OSError as error:
        if error.errno is None:
            if isinstance(error, ConnectionError | TimeoutError):
                raise
            # Arrow's error about content: no system call has failed, so a retry fails, too.
            text = str(error).removesuffix(".")
            raise ValueError(
                f"the file {name} cannot be read: {text}. It is cut off or damaged: restore it"
            ) from error
        if error.filename is None and path not in str(error):
            # With an errno Python chooses the fitting subclass.
            raise OSError(error.errno, error.strerror or str(error), path) from error
        raise
    except Exception as error:
        raise ValueError(f"the file {name} cannot be read as the schema says: {error}") from error


def _fact(uid: str) -> str:
    return f"files-{uid}"
