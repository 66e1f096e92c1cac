"""A store in a bucket: S3, Azure, Google Cloud, or the memory of this process; by obstore.

- obstore is imported when a store is opened, and only then: most jobs have a disk.
- obstore repeats reads, lists, deletes and puts, within limits. A conditional put is sent once, and
  `store.create_by_id` decides about it: if obstore repeated one, our own write would be answered by "exists".
- The id of a write is metadata of the object, so readers get exactly the bytes that were written. S3, Azure
  and Google Cloud keep metadata and show them with a HEAD request; so do the servers that tests start. The
  first object without an id that is in the way reveals a store that does not.
- A bucket that is missing must not look like a job that has never run: its 404 is an error here.
- A fork does not copy obstore's threads; see `remote_store`. Spark's workers are forked off a daemon that
  uses no store.
"""

from __future__ import annotations

import contextlib
import functools
import re
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from flinkish_spark.core.clock import Clock, SystemClock
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

if TYPE_CHECKING:
    import obstore.store


#: Where an object carries the id of the create that wrote it. Azure wants a name that is one in C#, too.
WRITE_ID = "flinkishwriteid"
#: How long calls go on trying.
_PATIENCE_MS = 60_000
#: obstore's own retries: of requests that may be repeated, and of those that may not.
_RETRIES: Mapping[str, Any] = {
    "max_retries": 8,
    "retry_timeout": timedelta(seconds=45),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=5)},
}
_NO_RETRIES: Mapping[str, Any] = {"max_retries": 0}
#: Ends the readable part of an error's text; the rest repeats it in Rust's form.
_DEBUG, _MOST_TEXT = "\n\nDebug source:", 500
_STATUS = re.compile(r"status code: (\d{3})")
#: The services' words for a missing bucket.
_NO_BUCKET = re.compile(r"NoSuchBucket|ContainerNotFound|container does not exist|bucket does not exist")
#: S3 answers 400 when a body was too slow to arrive.
_SLOW_BODY = "RequestTimeout"
#: Refusals (4xx) that may pass in a moment.
_MAY_PASS = frozenset({408, 409, 412, 425, 429})
#: Characters that not all services leave as they are: Azure takes a backslash for a slash.
_ODD = re.compile(r"[\\\x00-\x1f\x7f]")

#: As many as S3 takes in one request.
_DELETED_AT_ONCE = 1_000


class ObjectStore(CountedStore):
    """A :class:`~flinkish_spark.core.store.Store` in a bucket."""

    def __init__(
        self,
        bucket: obstore.store.ObjectStore,
        once: obstore.store.ObjectStore,
        folder: str,
        place: str,
        *,
        secrets: tuple[str, ...] = (),
        clock: Clock | None = None,
    ) -> None:
        self._bucket, self._once, self._folder, self._place = bucket, once, folder, place
        self._secrets, self._clock = secrets, clock or SystemClock()
        self._keeps_ids = False
        super().__init__()

    def __repr__(self) -> str:
        return f"ObjectStore({self._place!r})"

    def read(self, key: str) -> bytes:
        import obstore

        path = self._path(key)
        with self._request("read", "read", key, may_miss=True):
            return bytes(obstore.get(self._bucket, path).bytes())

    def put(self, key: str, data: bytes) -> None:
        import obstore

        path = self._path(key)
        with self._request("put", "write", key):
            obstore.put(self._bucket, path, data, use_multipart=False)

    def create_if_absent(self, key: str, data: bytes) -> CreateResult:
        self._path(key)
        return create_by_id(self, key, data, uuid.uuid4().hex, self._clock, _PATIENCE_MS)

    def list(self, prefix: str) -> tuple[str, ...]:
        import obstore

        path = self._path(prefix)
        with self._request("list", "list", prefix):
            found = obstore.list_with_delimiter(self._bucket, path)
        paths = {one["path"] for one in found["objects"]} | set(found["common_prefixes"])
        names = sorted(one[len(path) + 1 :] for one in paths if one.startswith(f"{path}/"))
        folder = str(parse_key(prefix))
        return tuple(f"{folder}/{name}" for name in names if not name.startswith("."))

    def delete(self, key: str) -> None:
        import obstore

        path = self._path(key)
        with contextlib.suppress(ObjectMissing), self._request("delete", "delete", key, may_miss=True):
            obstore.delete(self._bucket, path)

    def sizes_below(self, folder: str) -> dict[str, int]:
        import obstore

        path = self._path(folder) if folder else self._folder
        begins, found = len(path) + 1 if path else 0, dict[str, int]()
        with self._request("list", "list", folder):
            for page in obstore.list(self._bucket, path or None, chunk_size=1_000):
                found |= {one["path"][begins:]: one["size"] for one in page}
        # S3A's empty object for a folder has lost the slash at its end here: it has the folder's name.
        folders = {name.rpartition("/")[0] for name in found}
        return {name: size for name, size in found.items() if name and (size or name not in folders)}

    def read_start(self, key: str, most_bytes: int) -> bytes:
        import obstore

        path = self._path(key)
        with self._request("read", "read", key, may_miss=True):
            return bytes(obstore.get(self._bucket, path, options={"range": (0, most_bytes)}).bytes())

    def copy(self, key: str, other: str) -> None:
        import obstore

        path, target = self._path(key), self._path(other)
        with self._request("copy", "copy", key, may_miss=True):
            obstore.copy(self._bucket, path, target)

    def delete_all(self, keys: Collection[str]) -> None:
        import obstore

        ordered = sorted(keys)
        for at in range(0, len(ordered), _DELETED_AT_ONCE):
            some = ordered[at : at + _DELETED_AT_ONCE]
            try:
                with self._request("delete", "delete", some[0], may_miss=True):
                    obstore.delete(self._bucket, [self._path(key) for key in some])
            except ObjectMissing:
                # Azure and Google Cloud stop at one that is missing.
                for key in some:
                    self.delete(key)

    def put_new(self, key: str, data: bytes, write_id: str) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError

        path, attributes = self._path(key), {WRITE_ID: write_id}
        with self._request("create", "create", key, is_lost=lambda error: not _is_refused(error)):
            try:
                obstore.put(self._once, path, data, mode="create", attributes=attributes, use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def write_id_at(self, key: str) -> str | None:
        """Return the id that the object carries; None for one that :meth:`put` has written, or a copy."""
        found = self._id_at(key)
        if found is None and not self._keeps_ids:
            self._check_keeps_ids()
        return found

    def _id_at(self, key: str) -> str | None:
        import obstore

        path = self._path(key)
        with self._request(
            "read", "look at", key, is_lost=lambda error: not _is_refused(error), may_miss=True
        ):
            return obstore.get(self._bucket, path, options={"head": True}).attributes.get(WRITE_ID)

    def _check_keeps_ids(self) -> None:
        """Refuse a store that forgets ids: our own write would be taken for somebody else's."""
        key, write_id = f".probes/{uuid.uuid4().hex}", uuid.uuid4().hex
        if not self.put_new(key, b"", write_id):
            raise UnknownOutcomeError("the store says that a new random key is taken")
        self._keeps_ids = self._id_at(key) == write_id
        with contextlib.suppress(StoreError):
            self.delete(key)
        if not self._keeps_ids:
            raise StoreError(
                f"{self._place} cannot hold a job directory",
                why="it does not keep the metadata of objects, which tell which process has written one",
                what_to_do="use a store that keeps x-amz-meta-* (or x-ms-meta-*, x-goog-meta-*) headers",
            )

    def _path(self, key: str) -> str:
        if _ODD.search(key):
            raise ValueError(f"not a key of an object store: {key!r}")
        return f"{self._folder}/{parse_key(key)}" if self._folder else str(parse_key(key))

    @contextlib.contextmanager
    def _request(
        self,
        kind: str,
        verb: str,
        key: str,
        is_lost: Callable[[Exception], bool] = lambda error: False,
        may_miss: bool = False,
    ) -> Iterator[None]:
        """Count a request, and translate its error."""
        from obstore.exceptions import BaseError

        self._count(kind)
        try:
            yield
        except (BaseError, OSError, ValueError) as error:
            is_missing = isinstance(error, FileNotFoundError) and not _NO_BUCKET.search(str(error))
            if may_miss and is_missing:
                raise ObjectMissing(key) from None
            text = str(error).partition(_DEBUG)[0]
            for secret in self._secrets:
                text = text.replace(secret, "***")
            text = " ".join(text.split())[:_MOST_TEXT]
            if is_lost(error):
                raise UnknownOutcomeError(text) from None
            failed = StoreError(
                f"cannot {verb} {key} in {self._place}", why=text, what_to_do=_what_to_do(error)
            )
            failed.ends_when_repeated = _is_refused(error)
            # The rest of obstore's message was not searched for secrets.
            raise failed from None


def _is_refused(error: Exception) -> bool:
    """Return whether an error is final: nothing was done, and a repetition fails as well."""
    from obstore.exceptions import (
        InvalidPathError,
        NotSupportedError,
        PermissionDeniedError,
        UnauthenticatedError,
    )

    refusals = (InvalidPathError, NotSupportedError, PermissionDeniedError, UnauthenticatedError)
    if isinstance(error, (*refusals, ValueError, FileNotFoundError)):
        return True
    status = _STATUS.search(str(error))
    if status is None or _SLOW_BODY in str(error):
        return False
    return 400 <= int(status[1]) < 500 and int(status[1]) not in _MAY_PASS


def _what_to_do(error: Exception) -> str:
    from obstore.exceptions import PermissionDeniedError, UnauthenticatedError

    if isinstance(error, FileNotFoundError) or _NO_BUCKET.search(str(error)):
        return "make the bucket, or check its name"
    if isinstance(error, PermissionDeniedError | UnauthenticatedError):
        return (
            "check the credentials, and the rights to read, write, delete and list: without the last one, S3 "
            "denies access to missing objects"
        )
    return "check that the store is there and can be reached from this host"


def open_object_store(spec: StoreSpec, url: StoreUrl) -> ObjectStore:
    try:
        from obstore.exceptions import BaseError
    except ImportError:
        raise ConfigError(
            "a store in a bucket needs the package obstore",
            what_to_do=f"{how_to_install('object-store')}, on the driver and on all executors",
        ) from None
    config = spec.resolve()
    # Shorter values, such as "true", are no secrets, and would be replaced in every message.
    secrets = tuple(value for value in spec.find_secrets() if len(value) >= 6)
    try:
        bucket, once = _bucket(url, config, _RETRIES), _bucket(url, config, _NO_RETRIES)
    except (BaseError, ValueError, TypeError) as error:
        text = str(error).partition("\n\n")[0]
        for secret in secrets:
            text = text.replace(secret, "***")
        raise ConfigError(f"{url.url} cannot be opened", why=text, what_to_do="check the options") from None
    return ObjectStore(bucket, once, url.folder, url.url, secrets=secrets)


def _bucket(url: StoreUrl, options: Mapping[str, str], retries: Any) -> obstore.store.ObjectStore:
    from obstore.store import AzureStore, GCSStore, S3Store

    config: Any = dict(options)
    if url.scheme == "s3":
        return S3Store(url.bucket, config=config, retry_config=retries)
    if url.scheme == "gs":
        return GCSStore(url.bucket, config=config, retry_config=retries)
    if url.scheme == "memory":
        return _memory(url.bucket)
    if url.account:
        # How obstore finds an account of another cloud than the public one.
        clouds: dict[str, dict[str, str]] = {
            "core.windows.net": {},
            "fabric.microsoft.com": {"use_fabric_endpoint": "true"},
        }
        other = {"endpoint": f"https://{url.account}.blob.{url.cloud}"}
        config = {"account_name": url.account, **clouds.get(url.cloud, other), **config}
    return AzureStore(url.bucket, config=config, retry_config=retries)


@functools.cache
def _memory(name: str) -> obstore.store.ObjectStore:
    from obstore.store import MemoryStore

    return MemoryStore()
