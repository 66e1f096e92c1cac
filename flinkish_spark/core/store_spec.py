"""The place of a store as a URL: a folder on a disk, or in a bucket."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NoReturn, Protocol

from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.store import FileStore, LocalStore, Store
from flinkish_spark.core.wings import load_part

#: What :meth:`StoreSpec.parse` takes, for messages.
_FORMS = (
    "an absolute path",
    "file:///folder",
    "s3://bucket/folder",
    "gs://bucket/folder",
    "abfss://container@account.dfs.core.windows.net/folder",
    "az://container/folder",
    "hdfs://namenode:8020/folder",
    "memory://name/folder",
)
#: Of the stores that there are, besides a disk.
SCHEMES = frozenset({"s3", "gs", "az", "abfss", "hdfs", "memory"})
_URL = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?P<rest>.*)", re.DOTALL)
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,220}")
#: A host and a port, or a nameservice.
_NAMENODE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}(:[0-9]{1,5})?")
_ACCOUNT = re.compile(r"(?P<account>[a-z0-9]+)\.dfs\.(?P<cloud>[a-z0-9.-]+)")
#: Characters that may be read as escapes, or as the end of the path.
_ODD = re.compile(r"[%?#\\\x00-\x1f\x7f]")
#: The value of an option that names an environment variable.
_BY_NAME = re.compile(r"env:(?P<name>[A-Za-z_][A-Za-z0-9_]*)")
#: Options that hold a secret, and those of them that only name one, or its place.
_SECRET = re.compile(r"secret|token|password|credential|(^|_)(sas|key)(_|$)|sse_customer|header")
_NO_SECRET = re.compile(r"_(id|file|url|uri|type|enabled)$|^(google_)?application_credentials$")
#: Options that contradict the URL.
_OF_THE_URL = frozenset({"bucket", "bucket_name", "container", "container_name", "prefix"})
#: A value with a login in it, such as a proxy's URL.
_LOGIN = re.compile(r"//[^/]*@")

_NO_OPTIONS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class StoreSpec:
    """URL and options by which any process opens a store; it is sent to executors, and holds no secret."""

    #: As :meth:`parse` has checked it; a plain path is an absolute folder on a disk that all processes share.
    url: str
    #: Options of the store in a bucket, by name; a secret as ``env:NAME``, the environment variable that
    #: holds it in the process which opens the store.
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str, options: Mapping[str, str] = _NO_OPTIONS) -> StoreSpec:
        place = StoreUrl.parse(url)
        for name, value in options.items():
            _check_option(place, name, value)
        return cls(place.url, tuple(sorted(options.items())))

    @classmethod
    def from_text(cls, text: str) -> StoreSpec:
        if not text.startswith("{"):
            return cls.parse(text)
        stored = json.loads(text)
        return cls.parse(stored["url"], stored["options"])

    def to_text(self) -> str:
        if not self.options:
            return self.url
        return json.dumps({"url": self.url, "options": dict(self.options)}, sort_keys=True)

    @property
    def is_local(self) -> bool:
        return self.url.startswith("/")

    @property
    def folder(self) -> Path:
        """The folder on a disk; raises ConfigError for a bucket."""
        if not self.is_local:
            raise ConfigError(
                f"{self.url} is no folder on a disk",
                what_to_do="use a job_dir on a disk that driver and executors share",
            )
        return Path(self.url)

    @property
    def hadoop_url(self) -> str:
        """The URL of the store in Hadoop's file system, by which Spark finds its own files there."""
        if self.is_local:
            # To Spark a plain path means the default file system of the cluster (``fs.defaultFS``).
            return f"file://{self.url}"
        place = StoreUrl.parse(self.url)
        rest = self.url.partition("://")[2]
        if place.scheme == "s3":
            return f"s3a://{rest}"
        if place.scheme in ("gs", "abfss", "hdfs"):
            return self.url
        raise ConfigError(
            f"Spark cannot keep its state in {self.url}",
            why=f"Hadoop has no file system for {place.scheme}:",
            what_to_do="write abfss://container@account.dfs.core.windows.net/folder"
            if place.scheme == "az"
            else "give a job_dir on a disk, or in a bucket",
        )

    def open(self) -> Store:
        return LocalStore(Path(self.url)) if self.is_local else self.open_bucket()

    def open_bucket(self) -> FileStore:
        # A program names a store by its URL only, and executors get it as a text: the scheme is all there is.
        url = StoreUrl.parse(self.url)
        open_store: StoreOpener = load_part(f"store {url.scheme}")
        return open_store(self, url)

    def resolve(self) -> dict[str, str]:
        """Return the options with the values of the environment variables that they name: with secrets."""
        return resolve_options(self.options)

    def find_secrets(self) -> tuple[str, ...]:
        values = self.resolve()
        return tuple(values[name] for name, text in self.options if _BY_NAME.fullmatch(text))

    def to_child(self, key: str) -> StoreSpec:
        if self.is_local:
            return StoreSpec(str(Path(self.url, key)))
        return StoreSpec(f"{self.url}/{key}", self.options)

    def to_parent(self, levels: int) -> StoreSpec:
        return StoreSpec(self.url.rsplit("/", levels)[0], self.options)


def resolve_options(options: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Return options with the values of the environment variables that they name: with secrets."""
    found = {}
    for name, text in options:
        by_name = _BY_NAME.fullmatch(text)
        value = text if by_name is None else os.environ.get(by_name["name"])
        if value is None:
            variable = text.removeprefix("env:")
            raise ConfigError(
                f"the environment variable {variable} is not set",
                why=f"each process that opens the store reads the option {name} from this variable",
                what_to_do=f"set {variable}; on executors, set spark.executorEnv.{variable}",
            )
        found[name] = value
    return found


@dataclass(frozen=True, slots=True)
class StoreUrl:
    """A URL in its parts; a local one has a path alone."""

    scheme: str
    bucket: str
    #: Of a bucket: without slashes at its ends. Of a disk: absolute.
    folder: str
    #: Of Azure, if the URL says them.
    account: str = ""
    cloud: str = ""

    @classmethod
    def parse(cls, url: str) -> StoreUrl:
        if url.startswith("/"):
            return cls("file", "", _local(url))
        found = _URL.fullmatch(url)
        if found is None:
            _refuse(url, "it is neither a URL nor an absolute path")
        scheme, rest = found["scheme"].lower(), found["rest"]
        if scheme == "file":
            if _ODD.search(rest):
                _refuse(
                    url, "a file: URL with such characters is read in two ways", "write it as a plain path"
                )
            # Spark writes file:/x, and file:///x.
            path = rest.removeprefix("//") if rest.startswith("///") else rest
            if not path.startswith("/") or path.startswith("//"):
                _refuse(url, "it names a host, or no absolute path")
            return cls("file", "", _local(path))
        if scheme not in SCHEMES:
            hint = {"s3a": "s3", "s3n": "s3", "abfs": "abfss", "wasbs": "abfss", "gcs": "gs"}.get(scheme)
            _refuse(url, f"there is no store for {scheme}:", f"write {hint}://" if hint else "")
        if not rest.startswith("//"):
            _refuse(url, f"{scheme}: is followed by two slashes")
        bucket, _, folder = rest[2:].partition("/")
        account = cloud = ""
        if scheme == "abfss":
            bucket, _, host = bucket.partition("@")
            at = _ACCOUNT.fullmatch(host)
            if at is None:
                _refuse(url, "it does not say container@account.dfs.core.windows.net")
            account, cloud = at["account"], at["cloud"]
        if "@" in bucket:
            _refuse(url, "a login in a URL would be shown in logs", "give credentials as options: env:NAME")
        if scheme == "hdfs" and _NAMENODE.fullmatch(bucket) is None:
            _refuse(
                url,
                "it has no NameNode, or nameservice, after the two slashes",
                "write what fs.defaultFS says: hdfs://namenode:8020/folder, or hdfs://nameservice/folder",
            )
        if scheme != "hdfs" and _BUCKET.fullmatch(bucket) is None:
            _refuse(url, "it has no name of a bucket, or container, after the two slashes")
        folder = folder.rstrip("/")
        if _ODD.search(folder):
            _refuse(url, "its folder has characters that stores and Spark read in different ways")
        if folder and any(part in ("", ".", "..") for part in folder.split("/")):
            _refuse(url, "its folder has a part that is empty, . or ..")
        if scheme == "hdfs" and ":" in folder:
            _refuse(url, "HDFS takes no colon in a name")
        return cls(scheme, bucket, folder, account, cloud)

    @property
    def url(self) -> str:
        if self.scheme == "file":
            return self.folder
        host = f"{self.bucket}@{self.account}.dfs.{self.cloud}" if self.account else self.bucket
        return f"{self.scheme}://{host}/{self.folder}".rstrip("/")


class StoreOpener(Protocol):
    """Opens the stores of a scheme; registered under ``store SCHEME``."""

    def __call__(self, spec: StoreSpec, url: StoreUrl) -> FileStore: ...


def _local(path: str) -> str:
    return path.rstrip("/") or "/"


def redact_url(url: str) -> str:
    """Return a URL for messages, without a possible login, or a signature after a question mark."""
    return re.sub(r"//.*@", "//***@", url.partition("?")[0], flags=re.DOTALL)


def _refuse(url: str, why: str, hint: str = "") -> NoReturn:
    shown = redact_url(url)
    raise ConfigError(
        f"{shown!r} is not the place of a store",
        why=why,
        what_to_do=hint or f"give one of: {', '.join(_FORMS)}",
    )


def _check_option(place: StoreUrl, name: str, value: str) -> None:
    if place.scheme in ("file", "hdfs", "memory"):
        raise ConfigError(
            f"{place.url} takes no options, and {name} was given",
            what_to_do="put what HDFS needs into core-site.xml and hdfs-site.xml of HADOOP_CONF_DIR, where "
            "Spark looks, too"
            if place.scheme == "hdfs"
            else "leave the options out",
        )
    if name.lower().removeprefix("aws_").removeprefix("azure_").removeprefix("google_") in _OF_THE_URL:
        raise ConfigError(f"the option {name} contradicts {place.url}", what_to_do="leave the option out")
    if not isinstance(value, str):
        raise ConfigError(f"the option {name} of {place.url} is no text", what_to_do="write it as text")
    plain = name.lower()
    is_secret = (_SECRET.search(plain) and not _NO_SECRET.search(plain)) or _LOGIN.search(value)
    if is_secret and _BY_NAME.fullmatch(value) is None:
        raise ConfigError(
            f"the option {name} of {place.url} is a secret",
            why="the options of a store are written into logs and plans, and sent to other processes",
            what_to_do=f"put it into an environment variable and give its name: {name}=env:NAME",
        )
