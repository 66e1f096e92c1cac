"""What a program says about a lookup join: elements, and the rows of a table outside."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flinkish_spark.arguments import instance_of, refuse_if_never_run, refused_as_config_errors, unusable
from flinkish_spark.errors import ConfigError
from flinkish_spark.joins.checks import element_ddl, one_of
from flinkish_spark.joins.functions import Concatenate, ProcessJoinFunction
from flinkish_spark.joins.kinds import JoinType
from flinkish_spark.operators.elements import MAX_WATERMARK_MS
from flinkish_spark.protocol.limits import checked_whole


class LookupTable(ABC):
    """A table outside that is asked for the rows of keys.

    An object travels to the workers, and is opened there; connections are made in `open`.

    Examples
    --------
    >>> class Countries(LookupTable):
    ...     def lookup(self, keys):
    ...         names = {"de": "Germany", "fr": "France"}
    ...         return {key: [(names[key],)] for key in keys if key in names}
    """

    def open(self) -> None:
        """Make what cannot travel; called once per copy."""

    @abstractmethod
    def lookup(self, keys: Sequence[Any]) -> Mapping[Any, Sequence[Any]]:
        """Return the rows of keys, of which there are none twice; one without rows may be left out.

        Rows are tuples, or say the names of their fields: dicts, dataclasses, Rows. Of one field the value
        itself will do. A join with a function gives it the rows as they are.

        An exception ends the micro-batch, which is run again after the restart.
        """

    def close(self) -> None:
        """Give back what `open` made."""


@dataclass(frozen=True)
class LookupCache:
    """How long answers are kept, also those that there are no rows; in the memory of each Python worker.

    Parameters
    ----------
    ttl_ms
        How old an answer may be, by processing time.
    max_keys
        When there are more, those that were not used for longest go.

    Raises
    ------
    ConfigError
        One is not positive.
    """

    ttl_ms: int
    max_keys: int = 10_000

    def __post_init__(self) -> None:
        _positive("ttl_ms", self.ttl_ms)
        _positive("max_keys", self.max_keys)


@dataclass(frozen=True)
class LookupJoin:
    """Joins each element with the rows that a table has for it at that time.

    The table is outside: if a micro-batch is run again after a crash, it may have changed, and the result
    with it. Results of micro-batches that count are decided once, like all others.

    Parameters
    ----------
    left_type, right_type
        DDL of the elements, and of the table's rows: fields, or one type.
    key_of
        From an element to the key to ask for; None, or a tuple with a None, has no rows.
    table
        The table.
    join_type
        INNER, or LEFT: then elements without rows come out with None.
    function
        What is made of a pair; None: the fields of both.
    cache
        What is kept of the answers; None: each batch of a micro-batch asks anew.
    keys_per_call
        At most; the keys of a micro-batch are asked for together.

    Raises
    ------
    ConfigError
        Something is of another type, or the join would keep the table's rows.
    """

    left_type: str
    right_type: str
    key_of: Callable[[Any], Any]
    table: LookupTable
    join_type: JoinType = JoinType.INNER
    function: ProcessJoinFunction | None = None
    cache: LookupCache | None = None
    keys_per_call: int = 1_000

    def __post_init__(self) -> None:
        element_ddl("left_type", self.left_type)
        element_ddl("right_type", self.right_type)
        one_of("join_type", self.join_type, JoinType)
        if not callable(self.key_of) or isinstance(self.key_of, type):
            raise unusable(
                "key_of", self.key_of, wanted="a function of an element", what_to_do="give a function"
            )
        refuse_if_never_run(self.key_of, "key_of()")
        kind: type = LookupTable
        instance_of("table", self.table, kind, what_to_do="give an object of a subclass of LookupTable")
        if self.function is not None:
            makes: type = ProcessJoinFunction
            instance_of("function", self.function, makes, what_to_do="give one, or leave it out")
        if self.cache is not None:
            instance_of("cache", self.cache, LookupCache, what_to_do="give a LookupCache, or leave it out")
        _positive("keys_per_call", self.keys_per_call)
        if self.join_type.keeps_right:
            raise ConfigError(
                f"a lookup join cannot be a {self.join_type.value} join",
                why="only rows that elements ask for are read of the table",
                what_to_do="use JoinType.INNER or JoinType.LEFT",
            )

    @property
    def actual_function(self) -> ProcessJoinFunction:
        """The function, or the one that puts the fields of both together."""
        return Concatenate(self.left_type, self.right_type) if self.function is None else self.function


def _positive(name: str, value: int) -> None:
    with refused_as_config_errors(f"set {name} to 1 or more"):
        checked_whole(name, value, least=1, most=MAX_WATERMARK_MS)
