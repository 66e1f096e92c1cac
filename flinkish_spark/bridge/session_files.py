"""Files that a session ships to its executors: copied at the call, packed, and sent by Spark.

Spark sends a file or an archive to each executor, also to later ones, with the first task after the call, and
keeps it until the session ends. It accepts a path once: changed content is not sent again, and files with the
same name in two folders are one file to it. So we ship a copy: an archive named by its content, which is
unpacked into a folder of that name.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib
import os
import re
import shutil
import stat
import sys
import tarfile
import threading
import uuid
import weakref
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from py4j.protocol import Py4JJavaError
from pyspark import SparkFiles
from pyspark.sql import SparkSession

from flinkish_spark.bridge.session import jvm
from flinkish_spark.core.errors import ConfigError, EnvironmentFault
from flinkish_spark.core.foreign_errors import describe_error

#: Prefix of our names in the folder of Spark's files.
OWN_PREFIX = "flinkish-"
_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):")
_TARS = (".tar.gz", ".tgz", ".tar")
_COPIED_AT_ONCE = 1 << 20
#: Copies in this folder are already sent.
_SENDING = threading.Lock()
#: Shipped folders on the Python path, by session and original path.
_TAKEN: weakref.WeakKeyDictionary[Any, dict[str, str]] = weakref.WeakKeyDictionary()
#: A constant time, so that equal content gives equal zips: the earliest that a zip can have.
_LONG_AGO = (1980, 1, 1, 0, 0, 0)


@contextmanager
def local_copy(spark: SparkSession, what: str, place: str) -> Iterator[Path]:
    """Yield a local path for a path or URL; a remote file is downloaded for the duration of the block."""
    if not isinstance(place, str) or not place or "\0" in place:
        raise ConfigError(
            f"the path of {what} is {place!r:.200}",
            what_to_do="write the path of a file or folder, or a URL like hdfs://namenode:8020/file",
        )
    scheme = _URL.match(place)
    if scheme is not None and scheme[1].lower() != "file":
        target = _folder(spark) / uuid.uuid4().hex
        try:
            yield _download(spark, what, place, scheme[1].lower(), target)
        finally:
            shutil.rmtree(target, ignore_errors=True)
        return
    # Resolves `..`, since the last part becomes the name of the copy.
    path = Path(os.path.abspath(place if scheme is None else url2pathname(urlsplit(place).path)))
    if not os.path.exists(path):
        raise ConfigError(
            f"{what} is not at {path}",
            why=f"there is no such file or folder on the driver (in {os.getcwd()})",
            what_to_do="correct the path",
        )
    if not (path.is_file() or path.is_dir()) or not os.access(path, os.R_OK):
        raise ConfigError(
            f"{what} at {path} is neither a file nor a folder, or its rights forbid it",
            what_to_do="name one that this process may read",
        )
    yield path


def _download(spark: SparkSession, what: str, url: str, scheme: str, target: Path) -> Path:
    if scheme in ("http", "https", "ftp"):
        raise ConfigError(
            f"{what} is at a URL of {scheme}",
            why="it could be another content at each start, or half of one",
            what_to_do="download it, and give the path; or put it into a bucket or on HDFS",
        )
    if urlsplit(url).password is not None:
        raise ConfigError(
            f"the URL of {what} has a password in it",
            why="URLs appear in logs",
            what_to_do="give Hadoop the login by its own settings (spark.hadoop.fs...)",
        )
    # Hadoop's file system for S3 has the scheme s3a.
    place = f"s3a{url[2:]}" if scheme == "s3" else url
    hadoop: Any = jvm(spark).org.apache.hadoop.fs
    try:
        path = hadoop.Path(place)
        system = path.getFileSystem(spark._jsparkSession.sessionState().newHadoopConf())
        is_there = system.exists(path)
        if is_there:
            # The name is kept, since programs look at suffixes.
            own = target / str(path.getName())
            target.mkdir(parents=True)
            system.copyToLocalFile(False, path, hadoop.Path(own.as_uri()), True)
            return own
    except Py4JJavaError as error:
        raise EnvironmentFault(
            f"{what} at {url} cannot be read",
            why=describe_error(error),
            what_to_do="look whether the session has Hadoop's file system for it, and its login; or copy it",
        ) from error
    raise ConfigError(f"{what} is not at {url}", why="nothing is there", what_to_do="correct the URL")


def ship_tree(
    spark: SparkSession, what: str, parts: Iterable[tuple[str, Path]], *, is_executable: bool = False
) -> str:
    """Ship files and folders as they are now; return their path in tasks, relative to Spark's files."""
    folder = _folder(spark)
    unnamed = folder / f"{uuid.uuid4().hex}.tmp"
    try:
        name = f"{OWN_PREFIX}{_pack(unnamed, _entries(parts), is_executable)}"
        archive = folder / f"{name}.zip"
        with _SENDING:
            if not archive.exists():
                unnamed.rename(archive)
                _send(spark, what, archive, name)
    except ValueError as error:
        raise ConfigError(f"{what} cannot be shipped", why=str(error), what_to_do="take it out") from None
    except OSError as error:
        what_to_do = "make sure that it can be read, and that spark.local.dir has room for it"
        raise EnvironmentFault.from_os_error(
            error, f"{what} cannot be shipped", what_to_do=what_to_do
        ) from error
    finally:
        unnamed.unlink(missing_ok=True)
    return name


def ship_archive(spark: SparkSession, what: str, archive: Path, target: str) -> None:
    """Ship an archive unchanged; tasks find its contents in a folder of that name among Spark's files."""
    suffix = _suffix_of(what, archive)
    is_tar = suffix == ".tar"
    name = f"{OWN_PREFIX}{_digest(archive)}{'.tar.gz' if is_tar else suffix}"
    names = {text.rpartition("#")[2]: text for text in spark.sparkContext.listArchives}
    if target in names:
        if names[target].endswith(f"/{name}#{target}"):
            return
        raise ConfigError(
            f"the session has another archive '{target}'",
            why="Spark keeps shipped files until the session ends, and would mix the two",
            what_to_do="give another target_dir, or start a new session",
        )
    shipped = _folder(spark) / name
    if is_tar:
        # Spark loses the execute permissions in an uncompressed tar (SPARK-38632).
        with archive.open("rb") as plain, gzip.open(shipped, "wb", compresslevel=1) as packed:
            shutil.copyfileobj(plain, packed, _COPIED_AT_ONCE)
    else:
        shutil.copyfile(archive, shipped)
    _send(spark, what, shipped, target)


def _send(spark: SparkSession, what: str, archive: Path, target: str) -> None:
    try:
        spark.sparkContext.addArchive(f"{archive.as_uri()}#{target}")
    except Py4JJavaError as error:
        raise EnvironmentFault(
            f"{what} cannot be unpacked on the driver",
            why=describe_error(error),
            what_to_do="make sure that spark.local.dir has room, and start a new session",
        ) from error


def add_to_python_path(spark: SparkSession, what: str, origin: str, name: str) -> None:
    """Put a shipped folder on the Python path of workers and this process, before installed packages."""
    context: Any = spark.sparkContext
    before = _TAKEN.setdefault(context, {}).setdefault(origin, name)
    if before != name:
        raise ConfigError(
            f"{what} has changed since this session added it",
            why="this process and its workers may have imported it as it was, and Python does so once",
            what_to_do="restart the program, or the notebook's kernel",
        )
    if name not in context._python_includes:
        # Spark's own list for `addPyFile`: names among its files that workers put on their path.
        context._python_includes.append(name)
        sys.path.insert(1, str(find_shipped(name)))
        importlib.invalidate_caches()


def find_shipped(name: str) -> Path:
    return Path(SparkFiles.get(name))


def _folder(spark: SparkSession) -> Path:
    """Return this session's folder for copies, which Spark deletes with the session."""
    context: Any = spark.sparkContext
    folder = Path(context._temp_dir) / "flinkish-files"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _entries(parts: Iterable[tuple[str, Path]]) -> Iterator[tuple[str, Path]]:
    """Yield names and paths of all files and folders, in order; names of folders end with a slash."""
    for name, place in parts:
        _check_text(place)
        if place.is_dir():
            yield from _walk(name, place, frozenset())
        else:
            yield name, place


def _walk(name: str, folder: Path, above: frozenset[Path]) -> Iterator[tuple[str, Path]]:
    real = folder.resolve()
    if real in above:
        raise ValueError(f"{folder} is a link to a folder in which it lies")
    prefix = f"{name}/" if name else ""
    if prefix:
        yield prefix, folder
    for child in sorted(folder.iterdir()):
        if child.name == "__pycache__":
            continue
        _check_text(child)
        if child.is_dir():
            yield from _walk(f"{prefix}{child.name}", child, above | {real})
        elif child.is_file():
            yield f"{prefix}{child.name}", child
        else:
            raise ValueError(f"{child} is no file and no folder, or leads nowhere")


def _check_text(place: Path) -> None:
    if not place.name.isprintable():
        raise ValueError(f"{str(place)!r} has a name that is no text")


def _pack(target: Path, entries: Iterable[tuple[str, Path]], is_executable: bool) -> str:
    """Write a zip that is equal for equal content; return its digest."""
    with zipfile.ZipFile(target, "w") as archive:
        for name, place in entries:
            info = zipfile.ZipInfo(name, _LONG_AGO)
            info.create_system = 3
            if name.endswith("/"):
                info.external_attr = (stat.S_IFDIR | 0o755) << 16
                archive.writestr(info, b"")
                continue
            may_run = is_executable or bool(place.stat().st_mode & stat.S_IXUSR)
            info.external_attr = (stat.S_IFREG | (0o755 if may_run else 0o644)) << 16
            with place.open("rb") as source, archive.open(info, "w", force_zip64=True) as packed:
                shutil.copyfileobj(source, packed, _COPIED_AT_ONCE)
    return _digest(target)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def _suffix_of(what: str, archive: Path) -> str:
    suffix = next((one for one in (".zip", *_TARS) if archive.name.lower().endswith(one)), "")
    why = ""
    try:
        if suffix == ".zip":
            with zipfile.ZipFile(archive) as opened:
                why = _why_outside(opened.namelist())
        elif suffix and archive.is_file():
            with tarfile.open(archive) as tar:
                why = _why_outside(member.name for member in tar)
        else:
            why = "it must be a file whose name ends with .zip, .tar, .tar.gz or .tgz"
    except (zipfile.BadZipFile, tarfile.TarError, OSError, EOFError) as error:
        why = f"its content does not fit its suffix: {error}"
    if why:
        raise ConfigError(
            f"{what} is no archive that Spark unpacks: {archive}",
            why=why,
            what_to_do="pack a folder with `zip -r` or `tar -czf`; ship a file with register_cached_file()",
        )
    return suffix


def _why_outside(names: Iterable[str]) -> str:
    found = next((name for name in names if name.startswith("/") or ".." in Path(name).parts), None)
    return "" if found is None else f"{found!r} in it lies outside of the folder that it is unpacked into"
