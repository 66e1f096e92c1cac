"""What a Delta sink is told: the table, what it does with rows, how it stages; checked when it is made."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from flinkish_spark.connectors.delta.files import why_no_path
from flinkish_spark.connectors.delta.table import (
    Append,
    OverwritePartitions,
    SchemaEvolution,
    Upsert,
    WriteMode,
)
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.store_spec import SCHEMES, StoreSpec, shown_url
from flinkish_spark.core.validation import hold_plain_values, instance_of
from flinkish_spark.protocol.durations import PathText

_SCHEMA_OPTIONS = frozenset({"mergeschema", "overwriteschema", "replacewhere", "partitionoverwritemode"})
_OWN_OPTIONS = frozenset({"txnappid", "txnversion", "usermetadata"})
#: What changes how files are written and nothing else.
_KNOWN_OPTIONS = ("compression", "maxRecordsPerFile", "optimizeWrite", "parquet.writer.version")

#: The first one is the default.
PARQUET_CODECS = ("snappy", "none", "uncompressed", "gzip", "zstd", "brotli", "lz4", "lz4_raw")
#: Spark's names of schemes.
_PLAIN = {"s3a": "s3", "abfs": "abfss"}
_PAGE_VERSIONS = {"v1": "1.0", "parquet_1_0": "1.0", "v2": "2.0", "parquet_2_0": "2.0"}


@dataclass(frozen=True)
class DeltaSinkSettings:
    """The parameters of :class:`~flinkish_spark.DeltaSink`, which describes them."""

    path: PathText
    partition_by: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)
    mode: WriteMode = field(default_factory=Append)
    schema_evolution: SchemaEvolution = SchemaEvolution.NONE
    writer: str | None = None
    store_options: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hold_plain_values(self)
        object.__setattr__(self, "writer", _writer(self.writer))
        check_store_options(self.path, self.store_options)
        instance_of(
            "schema_evolution",
            self.schema_evolution,
            SchemaEvolution,
            what_to_do="use SchemaEvolution.NONE, ADD_COLUMNS or WIDEN_TYPES",
        )
        if not isinstance(self.mode, Append | Upsert | OverwritePartitions):
            raise ConfigError(
                f"mode is {self.mode!r}",
                what_to_do="use Append(), Upsert(keys=...) or OverwritePartitions()",
            )
        self._check_options()
        check_path("the Delta path", self.path)

    def _check_options(self) -> None:
        for name in self.options:
            if name.lower() in _SCHEMA_OPTIONS:
                raise ConfigError(
                    f"the Delta option '{name}' cannot be used",
                    why="what a commit changes must be known when its rows are staged",
                    what_to_do="use schema_evolution or mode, or ALTER TABLE while the job is stopped",
                )
            if name.lower() in _OWN_OPTIONS:
                raise ConfigError(
                    f"the Delta option '{name}' cannot be used",
                    why="the sink marks its commits with it, and exactly-once depends on that",
                    what_to_do="leave it out",
                )
            if name.lower() not in map(str.lower, _KNOWN_OPTIONS):
                raise ConfigError(
                    f"the Delta option '{name}' is not known",
                    why="a writer would pass over it without a word, or rows would not count as changes",
                    what_to_do=f"use {', '.join(_KNOWN_OPTIONS)}; properties belong into CREATE TABLE",
                )
        file_options(self.options)


def file_options(options: Mapping[str, str]) -> dict[str, Any]:
    """Return what options say of files, by the names of who writes them; raise ConfigError for no value."""
    given = {name.lower(): text for name, text in options.items()}
    for name, values in (("compression", PARQUET_CODECS), ("optimizeWrite", ("true", "false"))):
        text = given.get(name.lower(), values[0])
        if text.lower() not in values:
            raise _no_value(name, text, f"one of {', '.join(values)}")
    found: dict[str, Any] = {"compression": given.get("compression", PARQUET_CODECS[0]).lower()}
    if "maxrecordsperfile" in given:
        text = given["maxrecordsperfile"]
        if not re.fullmatch(r"[+-]?\d{1,18}", text, re.ASCII):
            raise _no_value("maxRecordsPerFile", text, "a whole number")
        # As in Spark, zero and less are no limit.
        found["max_rows"] = max(0, int(text))
    if "parquet.writer.version" in given:
        text = given["parquet.writer.version"]
        if text.lower() not in _PAGE_VERSIONS:
            raise _no_value("parquet.writer.version", text, f"one of {', '.join(_PAGE_VERSIONS)}")
        found["page_version"] = _PAGE_VERSIONS[text.lower()]
    return found


def _no_value(name: str, text: str, wanted: str) -> ConfigError:
    return ConfigError(
        f"the Delta option '{name}' cannot be {text!r}", what_to_do=f"make it {wanted}, or leave it out"
    )


def _writer(value: object) -> str:
    if value not in (None, "python"):
        raise ConfigError(
            f"writer is {value!r}", why="tasks write files in Python", what_to_do="leave writer out"
        )
    return "python"


def check_path(what: str, path: str) -> None:
    """Raise ConfigError for a path that is not the same place to all who are given it."""
    scheme, colon, rest = path.partition("://")
    # In a URL there may be a login.
    shown = path if path.startswith("/") else shown_url(path)
    if not colon and path[:5].lower() != "file:" and not PurePosixPath(path).is_absolute():
        raise ConfigError(
            f"{what} {shown!r} is relative",
            why="it would mean different places in different processes",
            what_to_do="give an absolute path or a URI",
        )
    if colon and not path.startswith("/") and scheme.lower() != "file":
        _check_url(what, path, rest)
    if why := why_no_path(path):
        raise ConfigError(
            f"{what} {shown!r} cannot be used",
            why=why,
            what_to_do="name a folder by an absolute path, or by file: without a host, such as /lake/events, "
            "without \\ or % in its name",
        )


def _check_url(what: str, url: str, rest: str) -> None:
    """Raise ConfigError for a URL that delta-rs would read as another place, or that has a login in it."""
    plain = plain_url(url)
    if plain.partition("://")[0].lower() in SCHEMES:
        StoreSpec.parse(plain)
        return
    why = ""
    if "@" in rest.partition("/")[0]:
        why = "a login in a URL would be shown in logs"
    elif "?" in rest or "#" in rest:
        why = "delta-rs takes what is behind ? or # for no part of the name"
    elif ".." in rest.split("/"):
        why = "it has a part that is .., which leads to another folder"
    if why:
        raise ConfigError(
            f"{what} {shown_url(url)!r} cannot be used",
            why=why,
            what_to_do="name the folder alone, and give credentials in store_options: env:NAME",
        )


def plain_url(path: str) -> str:
    """Return a URL by the name that a store's scheme has here: Spark's other ones lead to the same store."""
    scheme, colon, rest = path.partition("://")
    return f"{_PLAIN.get(scheme.lower(), scheme)}{colon}{rest}"


def check_store_options(path: str, options: Mapping[str, str]) -> None:
    """Raise ConfigError for an option that a table's store has not, or that is a secret in plain text."""
    if options:
        StoreSpec.parse(plain_url(path), options)
