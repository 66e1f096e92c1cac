"""A store on HDFS, by hdfs-native: files are renamed into their place, once.

- An object is written under a hidden name beside its own, synced, closed, and renamed: the NameNode renames
  in one step, so that an object is there whole or not at all.
- A rename moves a file once, however often it is asked for. A create asks for one without overwriting and,
  when the answer was lost, looks whether its hidden file is still there: only it knows that name. So no id
  has to lie in the object, which HDFS has no place for.
- The client has no time limit for an answer of the NameNode (0.14.7 waits for ever for one that is
  stopped), so each request is made in a thread of its own, which is given up after a time.
- A fork does not copy its threads; see `remote_store`.

Durability when a write returns: the bytes are synced on all DataNodes of the file (hsync), and the NameNode
has synced its log before it answers. A DataNode notes without a sync that a file was closed, unless
dfs.datanode.synconclose is set: a file is in doubt if all its DataNodes lose power at that moment.
"""

from __future__ import annotations

import contextlib
import functools
import re
import threading
import uuid
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future, wait
from operator import methodcaller
from typing import TYPE_CHECKING, NoReturn, TypeVar

from flinkish_spark.core.clock import SystemClock, SystemThreads, tries
from flinkish_spark.core.errors import ConfigError, StoreError
from flinkish_spark.core.extras import how_to_install
from flinkish_spark.core.remote_store import CountedStore
from flinkish_spark.core.store import (
    CreateResult,
    ObjectMissing,
    UnknownOutcomeError,
    create_by_id,
    parse_key,
)
from flinkish_spark.core.store_spec import StoreSpec, StoreUrl
from flinkish_spark.core.watchdog import note_failure

if TYPE_CHECKING:
    from hdfs_native import Client


T = TypeVar("T")
_CLOCK = SystemClock()

#: How long calls go on trying; less for a NameNode that has not answered this process yet: it may be a typing
#: error.
_PATIENCE_MS, _FIRST_PATIENCE_MS = 60_000, 15_000
#: How long one request may take, and the slowest transfer that is waited for.
_ANSWER_MS, _BYTES_PER_MS = 30_000, 1_000
_FIRST_PAUSE_MS, _LONGEST_PAUSE_MS = 100, 5_000
#: The client's own retries, each with all NameNodes that it knows. Longer outages are retried here.
_CLIENT_CONF = {
    "dfs.client.failover.max.attempts": "3",
    "dfs.client.failover.sleep.base.millis": "200",
    "dfs.client.failover.sleep.max.millis": "1000",
}
#: Final errors: nothing was done, and a repetition fails as well.
_REFUSED = re.compile(
    r"AccessControlException|AuthorizationException|InvalidToken|SASLError|GSSAPIError|NoSASLMechanism"
    r"|QuotaExceeded|InvalidPath|InvalidArgument|UrlParseError|ParentNotDirectory|PathIsNotEmptyDirectory"
    r"|Parent path is not a directory|must both be directories|UnsupportedFeature|XmlParseError"
)
_NO_RIGHT = re.compile(r"AccessControlException|AuthorizationException|InvalidToken|SASLError|GSSAPI|NoSASL")
_IS_FULL = re.compile(r"PathIsNotEmptyDirectory")
#: Where Java's stack begins, as a text or as Rust shows it.
_STACK = re.compile(r"(\n|\\n)(\t|\\t)at ")
_MOST_TEXT = 500
#: Characters that HDFS does not allow in names.
_ODD = re.compile(r"[:\\\x00-\x1f\x7f]")

#: Clients of this process by NameNode, and the NameNodes that have answered it.
_CLIENTS: dict[str, Client] = {}
_HEARD_OF: set[str] = set()
_LOCK = threading.Lock()


class HdfsStore(CountedStore):
    """A :class:`~flinkish_spark.core.store.FileStore` on HDFS."""

    def __init__(
        self,
        namenode: str,
        folder: str,
        *,
        patience_ms: int = _PATIENCE_MS,
        answer_ms: int = _ANSWER_MS,
    ) -> None:
        self._namenode, self._root, self._place = namenode, f"/{folder}".rstrip("/"), f"{namenode}/{folder}"
        self._patience_ms, self._answer_ms = patience_ms, answer_ms
        super().__init__()

    def __repr__(self) -> str:
        return f"HdfsStore({self._place!r})"

    def read(self, key: str) -> bytes:
        return self._read(key, None)

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._count("put")
        self._move(key, self._retry("write", key, lambda: self._write_bytes(path, data)))

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        create = _Create(self, key, data)
        try:
            return create_by_id(create, key, data, uuid.uuid4().hex, _CLOCK, self._patience())
        finally:
            create.forget()

    def list(self, prefix: str) -> tuple[str, ...]:
        path = self._path(prefix)

        def names(hdfs: Client) -> set[str]:
            # The listing of a file contains the file itself.
            return {one.path.rpartition("/")[2] for one in hdfs.list_status(path) if one.path != path}

        self._count("list")
        try:
            found = self._retry("list", prefix, lambda: self._ask(names))
        except FileNotFoundError:
            return ()
        folder = str(parse_key(prefix))
        return tuple(f"{folder}/{name}" for name in sorted(found) if not name.startswith("."))

    def delete(self, key: str) -> None:
        """Delete the object, and the folders that are empty then; a missing one is no error."""
        self.delete_all([key])

    def sizes_below(self, folder: str) -> dict[str, int]:
        path = self._path(folder) if folder else self._root
        self._count("list")
        found = self._retry("list", folder, lambda: self._sizes(path or "/"))
        return {name.removeprefix(f"{path}/"): size for name, size in found.items() if name != path}

    def read_start(self, key: str, most_bytes: int) -> bytes:
        return self._read(key, most_bytes)

    def copy(self, key: str, other: str) -> None:
        path, target = self._path(key), self._path(other)

        def copy() -> str:
            reader = self._ask(lambda hdfs: hdfs.read(path))
            size = len(reader)
            return self._write_hidden(target, lambda: reader.read_range_stream(0, size), size)

        self._count("copy")
        try:
            hidden = self._retry("copy", key, copy)
        except FileNotFoundError:
            raise ObjectMissing(key) from None
        self._move(other, hidden)

    def delete_all(self, keys: Collection[str]) -> None:
        paths = sorted({key: self._path(key) for key in keys}.items())
        for key, path in paths:
            self._count("delete")
            self._retry("delete", key, functools.partial(self._ask, methodcaller("delete", path)))
        self._delete_empty({path.rpartition("/")[0] for _, path in paths})

    def _read(self, key: str, most_bytes: int | None) -> bytes:
        path = self._path(key)

        def read() -> bytes:
            reader = self._ask(lambda hdfs: hdfs.read(path))
            size = len(reader) if most_bytes is None else min(most_bytes, len(reader))
            return self._ask(lambda _: reader.read_range(0, size), size) if size else b""

        self._count("read")
        try:
            return self._retry("read", key, read)
        except FileNotFoundError:
            raise ObjectMissing(key) from None

    def _write_bytes(self, target: str, data: bytes) -> str:
        return self._write_hidden(target, lambda: [data], len(data))

    def _write_hidden(self, target: str, chunks: Callable[[], Iterable[bytes]], size: int) -> str:
        """Write bytes durably under a hidden name beside the target; return its path."""
        folder, _, name = target.rpartition("/")
        path = f"{folder}/.{name}.{uuid.uuid4().hex}.tmp"

        def write(hdfs: Client) -> None:
            with hdfs.create(path) as file:
                if size:
                    for chunk in chunks():
                        file.write(chunk)
                    file.hsync()

        self._ask(write, size)
        return path

    def _move(self, key: str, hidden: str) -> None:
        """Rename a hidden file to its key, replacing an older object."""
        path = self._path(key)

        def move() -> None:
            try:
                self._ask(lambda hdfs: hdfs.rename(hidden, path, overwrite=True))
            except FileNotFoundError:
                # An earlier try has moved it, whose answer was lost.
                if not self._ask(lambda hdfs: _is_there(hdfs, path)):
                    raise

        try:
            self._retry("write", key, move)
        except FileNotFoundError as error:
            self._fail("write", key, error)
        except StoreError:
            self.forget(hidden)
            raise

    def _sizes(self, path: str) -> dict[str, int]:
        def sizes(hdfs: Client) -> dict[str, int]:
            found = hdfs.list_status(path, recursive=True)
            return {one.path: one.length for one in found if not one.isdir}

        try:
            # The client makes one request for each folder.
            return self._ask(sizes, 4 * self._answer_ms * _BYTES_PER_MS)
        except FileNotFoundError as gone:
            if self._ask(lambda hdfs: _is_there(hdfs, path)):
                raise OSError(f"a folder went while it was listed: {_text(gone)}") from None
            return {}

    def _delete_empty(self, folders: set[str]) -> None:
        """Delete empty folders and their empty parents: a store has no folders of its own."""
        with contextlib.suppress(StoreError):
            for folder in sorted(folders, key=len, reverse=True):
                above = folder
                while above.startswith(f"{self._root}/") and self._is_deleted_if_empty(above):
                    above = above.rpartition("/")[0]

    def _is_deleted_if_empty(self, folder: str) -> bool:
        def delete() -> bool:
            try:
                return self._ask(lambda hdfs: hdfs.delete(folder))
            except RuntimeError as error:
                if _IS_FULL.search(str(error)):
                    return False
                raise

        return self._retry("delete", folder, delete)

    def is_there(self, path: str) -> bool:
        return self._ask_once("look at", path, lambda hdfs: _is_there(hdfs, path))

    def begin(self, key: str, data: bytes) -> str:
        """Write the bytes of an object under a hidden name, which is returned; raises as `is_there`."""
        path = self._path(key)
        try:
            return self._write_bytes(path, data)
        except (OSError, RuntimeError) as error:
            self._raise_lost("create", key, error)

    def move_new(self, hidden: str, key: str) -> bool:
        """Rename a hidden file to its key; return False if the key is taken; raises as `is_there`."""
        path = self._path(key)

        def move(hdfs: Client) -> bool:
            try:
                hdfs.rename(hidden, path)
            except FileExistsError:
                return False
            return True

        try:
            return self._ask_once("create", key, move)
        except FileNotFoundError as gone:
            raise UnknownOutcomeError(_text(gone)) from None

    def forget(self, hidden: str) -> None:
        with contextlib.suppress(OSError, RuntimeError):
            self._ask(lambda hdfs: hdfs.delete(hidden))

    def _ask_once(self, verb: str, key: str, ask: Callable[[Client], T]) -> T:
        try:
            return self._ask(ask)
        except FileNotFoundError:
            raise
        except (OSError, RuntimeError) as error:
            self._raise_lost(verb, key, error)

    def _raise_lost(self, verb: str, key: str, error: Exception) -> NoReturn:
        if _is_refused(error):
            self._fail(verb, key, error)
        raise UnknownOutcomeError(_text(error)) from None

    def _path(self, key: str) -> str:
        if _ODD.search(key):
            raise ValueError(f"not a key of a store on HDFS: {key!r}")
        return f"{self._root}/{parse_key(key)}"

    def _patience(self) -> int:
        is_heard_of = self._namenode in _HEARD_OF
        return self._patience_ms if is_heard_of else min(self._patience_ms, _FIRST_PATIENCE_MS)

    def _retry(self, verb: str, key: str, ask: Callable[[], T]) -> T:
        """Retry until there is an answer, within limits; a missing file and a refusal are answers."""
        for _ in tries(self._patience(), _CLOCK, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS):
            try:
                return ask()
            except FileNotFoundError:
                raise
            except (OSError, RuntimeError) as error:
                failure: Exception = error
                if _is_refused(error):
                    break
                note_failure(str(error))
        self._fail(verb, key, failure)

    def _ask(self, ask: Callable[[Client], T], size: int = 0) -> T:
        """Make one request, in a thread that is given up if it takes too long."""
        client, answer = _client(self._namenode), Future[T]()
        limit_ms = self._answer_ms + size // _BYTES_PER_MS
        SystemThreads().start("flinkish-hdfs", functools.partial(_answer, answer, ask, client))
        if not wait([answer], limit_ms / 1_000).done:
            # Its connection may never answer again.
            with _LOCK:
                if _CLIENTS.get(self._namenode) is client:
                    del _CLIENTS[self._namenode]
            raise TimeoutError(f"no answer within {limit_ms / 1_000:g} s")
        if isinstance(answer.exception(), FileNotFoundError | FileExistsError | None):
            _HEARD_OF.add(self._namenode)
        return answer.result()

    def _fail(self, verb: str, key: str, error: Exception) -> NoReturn:
        failed = StoreError(
            f"cannot {verb} {key} in {self._place}", why=_text(error), what_to_do=_what_to_do(error)
        )
        failed.ends_when_repeated = _is_refused(error)
        raise failed from None


def open_hdfs_store(spec: StoreSpec, url: StoreUrl) -> HdfsStore:
    return HdfsStore(f"hdfs://{url.bucket}", url.folder)


class _Create:
    """One create: its bytes have a hidden name until they are renamed; its id is not stored."""

    def __init__(self, store: HdfsStore, key: str, data: bytes) -> None:
        self._store, self._key, self._data = store, key, data
        self._path = store._path(key)
        self._hidden: str | None = None
        self._id = ""

    def put_new(self, key: str, data: bytes, write_id: str) -> bool:
        """Ask once for the rename; return False if HDFS says that the key is taken."""
        self._id = write_id
        self._store._count("create")
        if self._hidden is None:
            if self._store.is_there(self._path):
                return False
            self._hidden = self._store.begin(key, data)
        if not self._store.move_new(self._hidden, key):
            return False
        self._hidden = None
        return True

    def write_id_at(self, key: str) -> str | None:
        """Return the id of this create if the object that is there is its own, None if it is another's."""
        self._store._count("read")
        # This order matters: an object that existed while the hidden file still did is not that file.
        is_taken = self._store.is_there(self._path)
        if self._hidden is None or self._store.is_there(self._hidden):
            if not is_taken:
                raise ObjectMissing(key)
            return None
        if not self._store.is_there(self._path):
            # It was written and deleted again, or its folder was, with the hidden file in it.
            self._hidden = None
            raise ObjectMissing(key)
        return self._id if self._store.read(key) == self._data else None

    def forget(self) -> None:
        if self._hidden is not None:
            self._store.forget(self._hidden)


def _answer(answer: Future[T], ask: Callable[[Client], T], client: Client) -> None:
    try:
        answer.set_result(ask(client))
    except Exception as error:
        answer.set_exception(error)
    except BaseException as panic:
        # Rust's panics are none of Python's exceptions.
        answer.set_exception(RuntimeError(f"{type(panic).__name__}: {panic}"))


def _is_there(hdfs: Client, path: str) -> bool:
    try:
        hdfs.get_file_info(path)
    except FileNotFoundError:
        return False
    return True


def _client(namenode: str) -> Client:
    with _LOCK:
        if namenode not in _CLIENTS:
            try:
                from hdfs_native import Client
            except ImportError:
                raise ConfigError(
                    "a job directory on HDFS needs the package hdfs-native",
                    what_to_do=f"{how_to_install('hdfs')}, on the driver and on all executors",
                ) from None
            try:
                _CLIENTS[namenode] = Client(namenode, dict(_CLIENT_CONF))
            except (RuntimeError, OSError) as error:
                raise ConfigError(
                    f"{namenode} names no NameNode",
                    why=f"it has no port, and is no nameservice of HADOOP_CONF_DIR ({_text(error)})",
                    what_to_do="write the port of fs.defaultFS, 8020 as a rule, or set HADOOP_CONF_DIR for "
                    "driver and executors",
                ) from None
        return _CLIENTS[namenode]


def _is_refused(error: Exception) -> bool:
    return isinstance(error, FileNotFoundError | NotImplementedError) or bool(_REFUSED.search(str(error)))


def _text(error: Exception) -> str:
    return " ".join(_STACK.split(str(error))[0].split())[:_MOST_TEXT] or type(error).__name__


def _what_to_do(error: Exception) -> str:
    text = str(error)
    if _NO_RIGHT.search(text):
        return (
            "check whom HDFS takes this process for (the principal of its Kerberos ticket, or "
            "HADOOP_USER_NAME), and the rights on the folder"
        )
    if "SafeMode" in text:
        return "wait until the NameNode has left its safe mode"
    if "QuotaExceeded" in text:
        return "raise the quota of the folder (hdfs dfsadmin), or make room below it"
    if "UnsupportedFeature" in text or isinstance(error, NotImplementedError):
        return "use a folder outside encryption zones"
    return "check that NameNode and DataNodes are there and can be reached from this host"
