"""Generated records: seeded, limited in rate, and the same in every replay."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from pyspark.sql import types as T

from flinkish_spark.arguments import instance_of, refused_as_config_errors
from flinkish_spark.errors import ConfigError
from flinkish_spark.graph.declared import check_field_names
from flinkish_spark.protocol.limits import UNLIMITED, Limit, Unlimited, checked_limit, checked_whole
from flinkish_spark.sources.generated import Counting, Field, RandomText, Times
from flinkish_spark.sources.rates import RateLimit
from flinkish_spark.sources.splits import SplitSource

if TYPE_CHECKING:
    import pyarrow as pa

#: Most of a batch: rows, and characters of random texts.
_ROWS_AT_ONCE, _TEXT_AT_ONCE = 10_000, 1 << 22
#: What a micro-batch takes from each split if nothing limits it: generating never waits for anything.
_AT_ONCE = 100_000
#: What Python says of an object, or of a function in one, of which it knows nothing else.
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+>")


class DataGeneratorSource(SplitSource):
    """Makes records up: the n-th is a pure function of seed and n, in every process and replay.

    Parameters
    ----------
    fields
        By name; see `docs/sources.md`. Fields differ from each other by their place in it.
    records
        How many there are in all; the job ends behind them. UNLIMITED for no end.
    seed
        Another seed, other records.
    rate
        Most records per second and per micro-batch, over all splits. Without it a micro-batch has 100,000 of
        each split.
    splits
        In how many parts they may be made at the same time; records are dealt to them in turns.

    Raises
    ------
    ConfigError
        An argument cannot be used.

    Examples
    --------
    >>> from flinkish_spark.sources.generated import Counting, RandomChoice
    >>> orders = DataGeneratorSource({"id": Counting(), "user": RandomChoice(["ann", "bob"])}, records=100)
    >>> next(orders.read("0", 7, 9)).to_pylist()
    [{'id': 7, 'user': 'ann'}, {'id': 8, 'user': 'ann'}]
    """

    kind = "generator"

    def __init__(
        self,
        fields: Mapping[str, Field],
        *,
        records: Limit = UNLIMITED,
        seed: int = 0,
        rate: RateLimit | None = None,
        splits: int = 1,
    ) -> None:
        if not isinstance(fields, Mapping) or not fields:
            raise ConfigError(f"fields is {fields!r}", what_to_do='give fields by name: {"id": Counting()}')
        for name, field in fields.items():
            instance_of("a name of fields", name, str, what_to_do='give fields by name: {"id": Counting()}')
            what_to_do = "give for example RandomLong(1, 100)"
            instance_of(f"fields[{name!r}]", field, Field, what_to_do=what_to_do)  # type: ignore[type-abstract]
            _check_identity(name, field)
        with refused_as_config_errors("see the documentation of DataGeneratorSource"):
            checked_limit("records", records, least=0)
            if not isinstance(records, Unlimited):
                checked_whole("records", records, least=0, most=(1 << 63) - 1)
            checked_whole("seed", seed, least=-(1 << 63), most=(1 << 63) - 1)
            checked_whole("splits", splits, least=1, most=10_000)
        _check_last(fields, records)
        self.schema = T.StructType([T.StructField(name, field.type) for name, field in fields.items()])
        check_field_names(self.schema, "a data generator")
        self.rate = RateLimit() if rate is None else rate
        self._fields, self._records, self._seed, self._parts = dict(fields), records, seed, splits

    @property
    def is_bounded(self) -> bool:  # type: ignore[override]
        """Whether a number of records was given."""
        return not isinstance(self._records, Unlimited)

    def splits(self) -> Sequence[str]:
        """Return the numbers of the parts."""
        return [str(number) for number in range(self._parts)]

    def end(self, split: str) -> int | None:
        """Return how many records a part has."""
        if isinstance(self._records, Unlimited):
            return None
        return max(0, -(-(self._records - int(split)) // self._parts))

    def latest(self, split: str, start: int, limit: int | None) -> int:
        """Return how far this micro-batch makes records."""
        wanted, end = start + (_AT_ONCE if limit is None else limit), self.end(split)
        return wanted if end is None else min(wanted, end)

    def read(self, split: str, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the records of a piece."""
        import pyarrow as pa

        texts = sum(field.length for field in self._fields.values() if isinstance(field, RandomText))
        rows = max(1, min(_ROWS_AT_ONCE, _TEXT_AT_ONCE // max(1, texts)))
        for first in range(start, end, rows):
            places = np.arange(first, min(end, first + rows), dtype=np.int64)
            numbers = places * self._parts + int(split)
            columns = [
                field.values(numbers, self._seed, stream)
                for stream, field in enumerate(self._fields.values())
            ]
            yield pa.RecordBatch.from_arrays(columns, names=list(self._fields))

    def fingerprint(self) -> Mapping[str, Any]:
        """Return what the records depend on; how many there are, and how fast they come, may change."""
        fields = [[name, repr(field)] for name, field in self._fields.items()]
        return {"fields": fields, "seed": self._seed, "splits": self._parts}


def _check_last(fields: Mapping[str, Field], records: Limit) -> None:
    """Refuse fields that cannot hold the last record, if there is one."""
    if isinstance(records, Unlimited) or records == 0:
        return
    for name, field in fields.items():
        # Others may do anything there.
        if isinstance(field, Counting | Times):
            with refused_as_config_errors(f"correct fields[{name!r}], or give it fewer records"):
                field.values(np.array([records - 1], dtype=np.int64), 0, 0)


def _check_identity(name: str, field: Field) -> None:
    """Refuse a field of the user's that cannot be told from others at the next start."""
    if type(field).__module__ == Field.__module__ or not _ADDRESS.search(repr(field)):
        return
    raise ConfigError(
        f"fields[{name!r}] is {field!r}",
        why="its repr has an address in this process, so the next start would take the records for others",
        what_to_do=f"define __repr__ in {type(field).__name__}, with all that its values depend on; or make "
        "it a frozen dataclass of plain values",
    )
