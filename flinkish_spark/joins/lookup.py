"""The specification of a lookup join of elements with rows of an external table."""

from __future__ import annotations

import sqlite3
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from flinkish_spark.core.elements import MAX_WATERMARK_MS
from flinkish_spark.core.errors import ConfigError
from flinkish_spark.core.fields import Arity, Range, check_fields
from flinkish_spark.core.validation import unusable
from flinkish_spark.joins.spec import JoinOfPairs, JoinType, ProcessJoinFunction, check_elements
from flinkish_spark.protocol.durations import Milliseconds


class LookupTable(ABC):
    """An external table in which rows are looked up by key.

    An object travels to the workers, and is opened there; connections are made in `open`.

    Examples
    --------
    >>> class Countries(LookupTable):
    ...     def lookup(self, keys):
    ...         names = {"de": "Germany", "fr": "France"}
    ...         return {key: [(names[key],)] for key in keys if key in names}
    """

    def open(self) -> None:
        """Make connections, which cannot be serialised; called once per copy."""

    @abstractmethod
    def lookup(self, keys: Sequence[Any]) -> Mapping[Any, Sequence[Any]]:
        """Return the rows of distinct keys; keys without rows may be left out.

        Rows are tuples, or have field names: dicts, dataclasses, Rows. A row with one field may be the value
        itself. A join function gets the rows unchanged.

        An exception ends the micro-batch, which is run again after the restart.
        """

    def close(self) -> None:
        """Release resources of `open`."""


@dataclass(frozen=True)
class LookupCache:
    """A cache of answers, also of empty ones, in the memory of each Python worker.

    Parameters
    ----------
    ttl_ms
        How old an answer may be, by processing time.
    max_keys
        If there are more, the least recently used answers are removed.
    """

    ttl_ms: Annotated[Milliseconds, Range(1, MAX_WATERMARK_MS)]
    max_keys: Annotated[int, Range(1, MAX_WATERMARK_MS)] = 10_000

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True)
class LookupJoin(JoinOfPairs):
    """A join of each element with the current rows of an external table.

    The table may change before a micro-batch is run again after a crash, and the results with it. Results of
    committed micro-batches stay as they are.
    `left_type` and `right_type` are DDL of the elements, and of the table's rows: fields, or one type. The
    other arguments are as of :meth:`DataStream.lookup_join`.
    """

    left_type: str
    right_type: str
    key_of: Annotated[Callable[[Any], Any], Arity(1)]
    table: LookupTable
    join_type: JoinType = JoinType.INNER
    function: ProcessJoinFunction | None = None
    cache: LookupCache | None = None
    keys_per_call: Annotated[int, Range(1, MAX_WATERMARK_MS)] = 1_000

    def __post_init__(self) -> None:
        check_elements(self)
        if self.join_type.keeps_right:
            raise ConfigError(
                f"a lookup join cannot be a {self.join_type.value} join",
                what_to_do="use JoinType.INNER or JoinType.LEFT",
            )


#: So that no statement has more parameters than any SQLite takes.
_PARAMETERS = 900


class SqliteTable(LookupTable):
    """A lookup table that is a table or view of SQLite.

    Parameters
    ----------
    file
        The database; opened for reading only, on the worker.
    table
        Columns of the key: one column means a scalar key, several a tuple.
    columns
        Columns of a row: one column means a scalar, several a tuple.
    """

    def __init__(
        self, file: str | Path, table: str, key_columns: Sequence[str], columns: Sequence[str]
    ) -> None:
        for name, names in (("key_columns", key_columns), ("columns", columns)):
            if isinstance(names, str):
                raise unusable(name, names, wanted="a list of names", what_to_do=f"write {name}=[{names!r}]")
        if not key_columns or not columns:
            raise ConfigError(
                f"the lookup table '{table}' has {len(key_columns)} key columns and {len(columns)} columns",
                what_to_do="name them, as key_columns=['id'], columns=['name']",
            )
        self._file, self._width, self._is_scalar = str(file), len(key_columns), len(columns) == 1
        self._table, self._key_columns = table, tuple(key_columns)
        self._connection: sqlite3.Connection | None = None
        wanted = ", ".join(f"t.{_quote(column)}" for column in columns)
        places = [f"k{at}" for at in range(self._width)]
        same = " AND ".join(
            f"t.{_quote(column)} = {name}" for column, name in zip(key_columns, places, strict=True)
        )
        self._values = f"({', '.join('?' * (self._width + 1))})"
        # Keys are named by their number: SQLite may give a key back as another type than it was asked for.
        self._query = (
            f"WITH asked(at, {', '.join(places)}) AS (VALUES {{values}}) "
            f"SELECT at, {wanted} FROM asked JOIN {_quote(table)} AS t ON {same}"
        )

    def open(self) -> None:
        uri = Path(self._file).absolute().as_uri()
        try:
            self._connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise sqlite3.OperationalError(f"{error}: {self._file}") from error

    def lookup(self, keys: Sequence[Any]) -> Mapping[Any, Sequence[Any]]:
        assert self._connection is not None
        found: dict[Any, list[Any]] = {}
        step = _PARAMETERS // (self._width + 1)
        for begin in range(0, len(keys), step):
            asked = keys[begin : begin + step]
            query = self._query.format(values=", ".join([self._values] * len(asked)))
            parameters = [part for at, key in enumerate(asked) for part in (at, *self._split_key(key))]
            try:
                rows = self._connection.execute(query, parameters)
            except (sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError) as error:
                # SQLite cannot take the key's type; other errors are the database's, and may be transient.
                kinds = sorted({type(part).__name__ for key in asked for part in self._split_key(key)})
                raise ConfigError(
                    f"the lookup table '{self._table}' cannot be asked for keys of the types "
                    f"{', '.join(kinds)}",
                    why=str(error),
                    what_to_do="make numbers, texts or bytes of them in the function that is given as key=",
                ) from error
            for at, *row in rows:
                found.setdefault(asked[at], []).append(row[0] if self._is_scalar else tuple(row))
        return found

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def _split_key(self, key: Any) -> tuple[Any, ...]:
        if self._width == 1:
            return (key,)
        if not isinstance(key, tuple | list) or len(key) != self._width:
            # The letters of a text would be as many.
            raise ConfigError(
                f"the lookup table '{self._table}' is asked for the key {key!r:.200}",
                why=f"it has the key columns {', '.join(self._key_columns)}",
                what_to_do=f"let the function that is given as key= return a tuple of {self._width}",
            )
        return tuple(key)


def _quote(name: str) -> str:
    if not name or "\0" in name:
        raise ConfigError(
            f"{name!r} cannot be the name of a table or column in SQLite",
            why="it is empty or has a zero byte",
            what_to_do="give the name as the database has it",
        )
    # Braces are the query's own place holders.
    return '"' + name.replace('"', '""').replace("{", "{{").replace("}", "}}") + '"'
