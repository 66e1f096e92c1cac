"""A table of an SQLite file for lookup joins; also the example of a table of one's own."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flinkish_spark.arguments import unusable
from flinkish_spark.errors import ConfigError
from flinkish_spark.joins.lookup import LookupTable

#: So that no statement has more parameters than any SQLite takes.
_PARAMETERS = 900


class SqliteTable(LookupTable):
    """Rows of a table or view, by some of its columns.

    Parameters
    ----------
    file
        The database; opened for reading only, on the worker.
    table
        Name of the table.
    key_columns
        What elements ask for: with one column the key is a scalar, else a tuple.
    columns
        What a row has; with one column it is a scalar, else a tuple.

    Raises
    ------
    ConfigError
        There is no key column or no column, or a name cannot be one; in a job: a key is none of the table's.
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
                why="it needs at least one of each",
                what_to_do="name them, as key_columns=['id'], columns=['name']",
            )
        self._file, self._width, self._is_scalar = str(file), len(key_columns), len(columns) == 1
        self._table, self._key_columns = table, tuple(key_columns)
        self._connection: sqlite3.Connection | None = None
        wanted = ", ".join(f"t.{_quoted(column)}" for column in columns)
        places = [f"k{at}" for at in range(self._width)]
        same = " AND ".join(
            f"t.{_quoted(column)} = {name}" for column, name in zip(key_columns, places, strict=True)
        )
        self._values = f"({', '.join('?' * (self._width + 1))})"
        # Keys are named by their number: SQLite may give a key back as another type than it was asked for.
        self._query = (
            f"WITH asked(at, {', '.join(places)}) AS (VALUES {{values}}) "
            f"SELECT at, {wanted} FROM asked JOIN {_quoted(table)} AS t ON {same}"
        )

    def open(self) -> None:
        """Connect."""
        uri = Path(self._file).absolute().as_uri()
        try:
            self._connection = sqlite3.connect(f"{uri}?mode=ro", uri=True, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise sqlite3.OperationalError(f"{error}: {self._file}") from error

    def lookup(self, keys: Sequence[Any]) -> Mapping[Any, Sequence[Any]]:
        """Return the rows of keys."""
        assert self._connection is not None
        found: dict[Any, list[Any]] = {}
        step = _PARAMETERS // (self._width + 1)
        for begin in range(0, len(keys), step):
            asked = keys[begin : begin + step]
            query = self._query.format(values=", ".join([self._values] * len(asked)))
            parameters = [part for at, key in enumerate(asked) for part in (at, *self._parts(key))]
            try:
                rows = self._connection.execute(query, parameters)
            except (sqlite3.InterfaceError, sqlite3.ProgrammingError, OverflowError) as error:
                # What cannot be handed to SQLite; all else is the database's, and may be over soon.
                kinds = sorted({type(part).__name__ for key in asked for part in self._parts(key)})
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
        """Disconnect."""
        if self._connection is not None:
            self._connection.close()

    def _parts(self, key: Any) -> tuple[Any, ...]:
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


def _quoted(name: str) -> str:
    if not name or "\0" in name:
        raise ConfigError(
            f"{name!r} cannot be the name of a table or column in SQLite",
            why="it is empty or has a zero byte",
            what_to_do="give the name as the database has it",
        )
    # Braces are the query's own place holders.
    return '"' + name.replace('"', '""').replace("{", "{{").replace("}", "}}") + '"'
