"""Names, partitions and properties that a user gives an Iceberg sink, checked without pyiceberg."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import quote, quote_plus

from flinkish_spark.connectors.write_modes import Append, WriteMode
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import TextPattern, check_fields
from flinkish_spark.core.secrets import hide_secrets

#: A column by its name, or one of Iceberg's transforms of it.
_TRANSFORM = re.compile(
    r"(?P<time>year|month|day|hour)\((?P<instant>[^(),]+)\)"
    r"|(?P<sized>bucket|truncate)\((?P<size>[1-9]\d{0,8}), ?(?P<value>[^(),]+)\)"
    r"|(?P<plain>[^(),]+)"
)
_TRANSFORMS = (
    "column, year(column), month(column), day(column), hour(column), bucket(16, column), truncate(4, column)"
)
#: Properties whose values are shown nowhere.
_SECRET = re.compile(
    r"secret|token|passw|pwd|credential|connection.string|sas|(account|access|api|private).?key|^sig|^header\.",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"//[^/\s]*@")

TABLE = Annotated[
    str, TextPattern(r"[^.\s]+(\.[^.\x00-\x1f]+){2,}", "catalog.schema.table, with a namespace at least")
]
BRANCH = Annotated[str, TextPattern(r"[^\s]+", "the name of a branch")]


@dataclass(frozen=True, slots=True)
class TableName:
    catalog: str
    #: One namespace or several, and the table.
    path: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> TableName:
        catalog, *path = text.split(".")
        return cls(catalog, tuple(path))

    def __str__(self) -> str:
        return ".".join((self.catalog, *self.path))


@dataclass(frozen=True, slots=True)
class PartitionTransform:
    column: str
    #: As Iceberg writes it: ``day``, ``bucket[16]``.
    transform: str

    @classmethod
    def parse(cls, text: str) -> PartitionTransform:
        found = _TRANSFORM.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"partition_by has {text!r}, which is no column and no transform of one",
                what_to_do=f"write one of: {_TRANSFORMS}",
            )
        if found["plain"]:
            return cls(found["plain"], "identity")
        if found["time"]:
            return cls(found["instant"], found["time"])
        return cls(found["value"], f"{found['sized']}[{found['size']}]")

    @property
    def name(self) -> str:
        return (
            self.column if self.transform == "identity" else f"{self.column}_{self.transform.split('[')[0]}"
        )


@dataclass(frozen=True)
class IcebergSinkSettings:
    """The parameters of :class:`~flinkish_spark.IcebergSink`, which describes them."""

    table: TABLE
    properties: Mapping[str, str] = field(default_factory=dict, repr=False)
    branch: BRANCH = "main"
    create_table: bool = False
    partition_by: tuple[str, ...] = ()
    table_properties: Mapping[str, str] = field(default_factory=dict)
    mode: WriteMode = field(default_factory=Append)

    def __post_init__(self) -> None:
        check_fields(self)
        check_properties(self.table, self.properties)
        if not self.create_table and (self.partition_by or self.table_properties):
            raise ConfigError(
                f"partition_by and table_properties are for a new table, and {self.table} is not created",
                what_to_do="set create_table=True, or leave them out: an existing table keeps its own",
            )
        for text in self.partition_by:
            PartitionTransform.parse(text)

    @property
    def name(self) -> TableName:
        return TableName.parse(self.table)

    @property
    def transforms(self) -> tuple[PartitionTransform, ...]:
        return tuple(map(PartitionTransform.parse, self.partition_by))


def check_properties(table: str, given: Mapping[str, str]) -> None:
    texts = [*given, *given.values()] if isinstance(given, Mapping) else [None]
    if not all(isinstance(one, str) for one in texts):
        # The values may be secrets.
        raise ConfigError(
            f"the properties of the catalog of {table} are no texts by name",
            what_to_do='give a dict of texts, such as {"type": "rest", "uri": "env:CATALOG"}',
        )


def redact(text: str, given: Mapping[str, str], *properties: Mapping[str, Any]) -> str:
    """Return a text of somebody else without the secrets in properties; `given` has variables for some."""
    secrets = {secret for one in properties for secret in _list_secrets(one, given)}
    for secret in sorted(secrets, key=len, reverse=True):
        for shown in (secret, quote(secret, safe=""), quote_plus(secret)):
            text = text.replace(shown, "***")
    return hide_secrets(_LOGIN.sub("//***@", text))


def _list_secrets(properties: Mapping[str, Any], given: Mapping[str, str], above: str = "") -> Iterator[str]:
    for name, value in properties.items():
        path = f"{above}{name}"
        if isinstance(value, Mapping):
            yield from _list_secrets(value, given, f"{path}.")
        elif isinstance(value, str) and value:
            is_variable = given.get(path, value) != value
            if is_variable or _SECRET.search(path) or _LOGIN.search(value):
                yield value
            if path.endswith("credential"):
                # A client's id and its secret.
                yield from filter(None, value.split(":"))
            # In a connection string, or a URL.
            parts = (one.partition("=") for one in re.split("[;&?]", value))
            yield from (inner for key, _, inner in parts if inner and _SECRET.search(key))
