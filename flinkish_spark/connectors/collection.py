"""A bounded source of records in memory, for tests and for small tables."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

from pyspark.sql import types as T

from flinkish_spark.connectors.splits import SplitSource
from flinkish_spark.core.errors import ConfigError, SchemaError
from flinkish_spark.core.fields import Range, check_arguments
from flinkish_spark.core.iterators import elements_of
from flinkish_spark.types.row_form import RowForm
from flinkish_spark.types.schemas import output_schema

_ALL = "all"


class CollectionSource(SplitSource):
    """Reads values of the program once, and ends.

    All values are sent to every task that reads, so they should be few: thousands, not millions.

    Parameters
    ----------
    values
        Tuples, named tuples, dicts, Rows or dataclasses; single values if the schema has one field.
    schema
        ``"user STRING, amount LONG"``, a StructType, a dataclass or a NamedTuple class.
    splits
        Number of parts that are read in parallel; records of different parts have no order.

    Raises
    ------
    ConfigError, SchemaError
        A value does not fit the schema; the message names it.

    Examples
    --------
    >>> orders = CollectionSource([("ann", 3), ("bob", 1)], "user STRING, amount LONG")
    >>> list(orders.read("all", 0, orders.end("all")))
    [('ann', 3), ('bob', 1)]
    """

    kind = "collection"
    is_bounded = True

    @check_arguments("values", "schema", splits="give the number of parts to read at the same time")
    def __init__(
        self,
        values: Iterable[Any],
        schema: str | T.StructType,
        *,
        splits: Annotated[int, Range(1, 10_000)] = 1,
    ) -> None:
        if isinstance(values, str | bytes | Mapping | Set) or not isinstance(values, Iterable):
            raise ConfigError(
                f"values is {values!r:.200}",
                why="records have an order, the same at every start",
                what_to_do="give a list of records",
            )
        self.schema = output_schema(schema, "a collection")
        self.values: tuple[tuple[Any, ...], ...] = tuple(_check_records(values, self.schema))
        self._parts = splits

    def splits(self) -> Sequence[str]:
        return [_ALL] if self._parts == 1 else [f"part-{number}" for number in range(self._parts)]

    def end(self, split: str) -> int:
        return len(self._part(split))

    def record_count(self) -> int:
        return len(self.values)

    def latest(self, split: str, start: int, limit: int | None) -> int:
        end = self.end(split)
        return end if limit is None else min(end, start + limit)

    def read(self, split: str, start: int, end: int) -> Iterator[tuple[Any, ...]]:
        return iter(self._part(split)[start:end])

    def fingerprint(self) -> Mapping[str, Any]:
        digest = hashlib.sha256(self.schema.json().encode())  # type: ignore[union-attr]
        for value in self.values:
            digest.update(repr(value).encode())
        return {"records": len(self.values), "splits": self._parts, "sha256": digest.hexdigest()}

    def _part(self, split: str) -> Sequence[tuple[Any, ...]]:
        number = 0 if split == _ALL else int(split.removeprefix("part-"))
        return self.values[number :: self._parts]


def _check_records(values: Iterable[Any], schema: T.StructType) -> Iterator[tuple[Any, ...]]:
    from flinkish_spark.types.rows import RowWriter

    verify, writer = T._make_type_verifier(schema), RowWriter.of(schema)
    for index, value in enumerate(elements_of(values)):
        try:
            record = _record(value, schema)
            verify(_to_dicts(record))
            # The tasks make the same check. Spark's verifier also accepts numbers for STRING, and long
            # decimals.
            writer.write([record])
        except (TypeError, ValueError, KeyError) as error:
            raise SchemaError(
                f"record {index} of the collection, {value!r}, does not fit the schema",
                why=str(error).replace("emitted", "it has", 1),
                what_to_do=f"correct it, or the schema: {json.dumps(schema.simpleString())}",
            ) from error
        yield record


def _to_dicts(value: Any) -> Any:
    """Return a value with dataclasses replaced by dicts: Spark's verifier fails at dataclasses with slots."""
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _to_dicts(getattr(value, field.name)) for field in fields(value)}
    if type(value) is dict:
        return {key: _to_dicts(one) for key, one in value.items()}
    return type(value)(map(_to_dicts, value)) if type(value) in (list, tuple) else value


def _record(value: Any, schema: T.StructType) -> tuple[Any, ...]:
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - set(schema.names))
        if unknown:
            raise KeyError(f"there is no field {unknown[0]!r}")
        return tuple(value.get(name) for name in schema.names)
    if hasattr(value, "__fields__") or hasattr(value, "_fields") or is_dataclass(type(value)):
        # By name, like rows that functions emit.
        record = RowForm(schema.names).tuple_of(value)
        # The fingerprint hashes the repr of records, and that of a Row differs from that of a tuple.
        return tuple(record) if isinstance(record, T.Row) else record
    if isinstance(value, list | tuple):
        return tuple(value)
    if len(schema) != 1:
        raise ValueError(f"it is one value, and the schema has {len(schema)} fields")
    return (value,)
