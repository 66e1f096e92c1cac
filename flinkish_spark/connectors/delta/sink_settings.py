"""Settings of a Delta sink (table, mode, file options), checked when the sink is made."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal

from flinkish_spark.connectors.delta.files import FOLDER, TableFiles, why_no_path
from flinkish_spark.connectors.delta.table import SchemaEvolution
from flinkish_spark.connectors.write_modes import Append, WriteMode
from flinkish_spark.core.errors import ConfigError, EnvironmentFault, StoreError
from flinkish_spark.core.fields import check_fields
from flinkish_spark.core.store import BucketStore, UnknownOutcomeError
from flinkish_spark.core.store_spec import SCHEMES, StoreSpec, redact_url
from flinkish_spark.protocol.durations import PathText

_SCHEMA_OPTIONS = frozenset({"mergeschema", "overwriteschema", "replacewhere", "partitionoverwritemode"})
_OWN_OPTIONS = frozenset({"txnappid", "txnversion", "usermetadata"})
#: Options that change how files are written and nothing else.
_KNOWN_OPTIONS = ("compression", "maxRecordsPerFile", "optimizeWrite", "parquet.writer.version")

#: The first one is the default.
PARQUET_CODECS = ("snappy", "none", "uncompressed", "gzip", "zstd", "brotli", "lz4", "lz4_raw")
#: Spark's names of schemes.
_PLAIN = {"s3a": "s3", "abfs": "abfss"}
_PAGE_VERSIONS = {"v1": "1.0", "parquet_1_0": "1.0", "v2": "2.0", "parquet_2_0": "2.0"}
_CHOICES = {
    "compression": PARQUET_CODECS,
    "optimizeWrite": ("true", "false"),
    "parquet.writer.version": tuple(_PAGE_VERSIONS),
}


@dataclass(frozen=True)
class DeltaSinkSettings:
    """The parameters of :class:`~flinkish_spark.DeltaSink`, which describes them."""

    path: PathText
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    mode: WriteMode = field(default_factory=Append)
    schema_evolution: SchemaEvolution = SchemaEvolution.NONE
    writer: Literal["python"] | None = None
    store_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self, writer="leave writer out")
        object.__setattr__(self, "writer", "python")
        check_path("the Delta path", self.path, self.store_options)
        for name in self.options:
            what, what_to_do = "", ""
            if name.lower() in _SCHEMA_OPTIONS:
                what = "cannot be used: changes of the schema must be known when rows are staged"
                what_to_do = "use schema_evolution or mode, or ALTER TABLE while the job is stopped"
            elif name.lower() in _OWN_OPTIONS:
                what, what_to_do = "cannot be used: the sink marks its commits with it", "leave it out"
            elif name.lower() not in map(str.lower, _KNOWN_OPTIONS):
                what = "is not known, and a writer would silently ignore it"
                what_to_do = f"use {', '.join(_KNOWN_OPTIONS)}; properties belong into CREATE TABLE"
            if what:
                raise ConfigError(f"the Delta option '{name}' {what}", what_to_do=what_to_do)
        file_options(self.options)


def file_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of the Parquet writer; raise ConfigError for a value that an option cannot have."""
    given = {name.lower(): text for name, text in options.items()}
    limit = given.get("maxrecordsperfile", "0")
    refused = [
        (name, f"one of {', '.join(values)}")
        for name, values in _CHOICES.items()
        if given.get(name.lower(), values[0]).lower() not in values
    ]
    if not re.fullmatch(r"[+-]?\d{1,18}", limit, re.ASCII):
        refused.append(("maxRecordsPerFile", "a whole number"))
    for name, wanted in refused:
        raise ConfigError(
            f"the Delta option '{name}' cannot be {given[name.lower()]!r}",
            what_to_do=f"make it {wanted}, or leave it out",
        )
    return {
        "compression": given.get("compression", PARQUET_CODECS[0]).lower(),
        # As in Spark, zero and less are no limit.
        "max_rows": max(0, int(limit)),
        "page_version": _PAGE_VERSIONS[given.get("parquet.writer.version", "v1").lower()],
    }


def check_path(what: str, path: str, options: Mapping[str, str] = MappingProxyType({})) -> None:
    """Raise ConfigError for a path that means different places to Spark and delta-rs, or has a login.

    The same for an option that the table's store does not have, and for a secret in plain text.
    """
    url = plain_url(path)
    scheme, colon, rest = url.partition("://")
    # A URL may have a login in it.
    shown = path if path.startswith("/") else redact_url(path)
    if not colon and path[:5].lower() != "file:" and not path.startswith("/"):
        raise ConfigError(f"{what} {shown!r} is relative", what_to_do="give an absolute path or a URI")
    why = why_no_path(path)
    if colon and not path.startswith("/") and scheme.lower() != "file":
        if scheme.lower() in SCHEMES:
            StoreSpec.parse(url)
        elif "@" in rest.partition("/")[0]:
            why = "a login in a URL would be shown in logs"
        elif "?" in rest or "#" in rest:
            why = "delta-rs ignores the part after ? or #"
        elif ".." in rest.split("/"):
            why = "its part .. leads to another folder"
    if why:
        raise ConfigError(
            f"{what} {shown!r} cannot be used",
            why=why,
            what_to_do="name a folder by an absolute path, by file: without a host, or by a URL, without "
            "\\ or % in its name; give credentials in store_options: env:NAME",
        )
    if options:
        StoreSpec.parse(url, options)


def plain_url(path: str) -> str:
    """Return a URL with our name of its scheme, such as s3 for Spark's s3a."""
    scheme, colon, rest = path.partition("://")
    return f"{_PLAIN.get(scheme.lower(), scheme)}{colon}{rest}"


#: Folder of short-lived objects that test the store.
_PROBES = f"{FOLDER}/.probes"
#: How often a test is repeated if answers are lost.
_TRIES = 5
#: Options of delta-rs that its stores do not have.
_OF_DELTA_RS = re.compile(
    r"(aws_)?s3_(locking_provider|allow_unsafe_rename|pool_idle_timeout_seconds)"
    r"|(aws_)?s3_get_internal_server_error_retries|aws_force_credential_load"
    r"|.*dynamo.*|max_retries|retry_timeout|backoff_config\..*|object_store_concurrency_limit",
    re.IGNORECASE,
)


def check_creates(path: str, options: Mapping[str, str], whose: str) -> None:
    """Refuse a table in a store that ignores the condition of a write (create only if absent).

    Commits depend on it: of two commits at the same moment, both would seem to succeed, and one be lost. A
    disk and HDFS need no test: they never create an existing file again.
    """
    url = plain_url(path)
    if TableFiles.of(path, {}).root is not None or url.lower().startswith("hdfs:"):
        return
    plain = {name: text for name, text in options.items() if not _OF_DELTA_RS.fullmatch(name)}
    store = StoreSpec.parse(url, plain).open_bucket()
    assert isinstance(store, BucketStore)
    if not _refuses_second(store, path):
        raise EnvironmentFault(
            f"the store of the Delta table {path} cannot be committed to by {whose}",
            why="it ignores the condition of a write (If-None-Match: *) and replaces an existing object, so "
            "two commits would overwrite each other",
            what_to_do="use a store, or a version of its server, that refuses such a write",
        )


def _refuses_second(store: BucketStore, path: str) -> bool:
    lost = ""
    for _ in range(_TRIES):
        key = f"{_PROBES}/{uuid.uuid4().hex}"
        try:
            # The key is new: no other process writes it.
            if store.put_new(key, b"", uuid.uuid4().hex):
                return not store.put_new(key, b"", uuid.uuid4().hex)
            lost = "it says that a new random key is taken"
        except UnknownOutcomeError as error:
            lost = str(error)
        finally:
            with suppress(StoreError):
                store.delete(key)
    raise StoreError(
        f"the store of the Delta table {path} cannot be tested",
        why=lost,
        what_to_do="check the store, and start the job again",
    )
