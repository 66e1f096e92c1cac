"""Names of tables: always quoted in SQL, so every letter counts, and its case."""

from __future__ import annotations

import re
from dataclasses import dataclass

from flinkish_spark.errors import ConfigError

_PART = re.compile(r'"((?:[^"]|"")+)"|([^".]+)')


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's name, with the schemas it is in.

    Parameters
    ----------
    parts
        From the outermost in; the last is the table.

    Examples
    --------
    >>> TableName.parse("sales.orders").parts
    ('sales', 'orders')
    >>> TableName.parse('sales."a ""b"".c"').parts
    ('sales', 'a "b".c')
    """

    parts: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read ``table`` or ``schema.table``; a part in double quotes may hold anything.

        Raises
        ------
        ConfigError
            It is not such a name.
        """
        parts, at = [], 0
        while True:
            match = _PART.match(text, at)
            if match is None:
                raise _refused(text)
            quoted, plain = match.groups()
            parts.append(plain if quoted is None else quoted.replace('""', '"'))
            at = match.end()
            if at == len(text):
                break
            if text[at] != ".":
                raise _refused(text)
            at += 1
        if len(parts) > 2:
            raise _refused(text)
        return cls(tuple(parts))

    def __str__(self) -> str:
        return ".".join(part if _plain(part) else '"' + part.replace('"', '""') + '"' for part in self.parts)


def _plain(part: str) -> bool:
    return not set('".') & set(part)


def _refused(text: str) -> ConfigError:
    return ConfigError(
        f"{text!r} is not the name of a table",
        why="it has to be table or schema.table, with parts that hold dots or quotes in double quotes",
        what_to_do='write it like sales.orders or sales."a.b"; a quote within quotes is doubled',
    )
