"""What a stream says about which task gets which records: rebalance, rescale and the like."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

from flinkish_spark.errors import GraphError
from flinkish_spark.graph.partitioning import Narrow, Spread, by_partitioner, said_parallelism
from flinkish_spark.graph.stream_graph import StreamNode, legs

if TYPE_CHECKING:
    from flinkish_spark.graph.frame_transforms import Transform


class Redistribution(ABC):
    """The part of a `DataStream` that moves records between tasks.

    Of use in front of functions in Python that take long: they run in as many tasks as the records are in,
    which are at first as many as the source has partitions. A keyed operator in front of which nothing stands
    needs none of it: it has its own tasks.

    Each task has its records in the order in which they were in front, and a record's place in its channel
    stays what it was, so the order in which a keyed operator gets the records of a key does not change. A
    repeated task gets the same records.
    """

    _node: StreamNode

    @abstractmethod
    def _behind(self, function: Transform) -> Self:
        """Return the stream behind a DataFrame function that moves rows."""

    def _refuse_union(self, method: str) -> None:
        if len(legs(self._node)) > 1:
            raise GraphError(
                f"{method}() was called on a union",
                why="what follows a union is done with each of its streams by itself, in tasks of their own",
                what_to_do="call key_by() on it, which brings all of them together; or leave it out",
            )

    def rebalance(self, parallelism: int | None = None) -> Self:
        """Distribute the records evenly, through a shuffle.

        What was made of one record stays together; which task gets it follows from its place in its channel.

        Parameters
        ----------
        parallelism
            Number of tasks; as many as Spark has shuffle partitions if left out. Of a union, so many for each
            of its streams.

        Raises
        ------
        ConfigError
            It is no number of tasks.

        Examples
        --------
        >>> stream.rebalance(8).map(slow)  # doctest: +SKIP
        """
        return self._behind(Spread(said_parallelism("rebalance", parallelism)))

    def shuffle(self, parallelism: int | None = None) -> Self:
        """Distribute the records as :meth:`rebalance` does.

        Flink draws a task for each record. A repeated task would draw others, so here a hash of the record's
        place stands in for chance.
        """
        return self._behind(Spread(said_parallelism("shuffle", parallelism)))

    def rescale(self, parallelism: int | None = None) -> Self:
        """Have fewer tasks read the partitions that more would, without a shuffle; see :meth:`rebalance`.

        Functions in front of it run in these tasks, too. It never makes more tasks: only a shuffle can.

        Parameters
        ----------
        parallelism
            At most so many tasks; as many as Spark has shuffle partitions if left out.
        """
        return self._behind(Narrow(said_parallelism("rescale", parallelism)))

    def global_(self) -> Self:
        """Send all records to one task, through a shuffle; see :meth:`rebalance`.

        The underscore is there since `global` is a word of Python's.

        Raises
        ------
        GraphError
            The stream is a union: each of its streams would have a task of its own.
        """
        self._refuse_union("global_")
        return self._behind(Spread(1))

    def forward(self) -> Self:
        """Return the stream as it is: records stay in their tasks unless something else is said."""
        return self

    def partition_custom(
        self,
        partitioner: Any,
        key: str | Callable[[Any], Any] | Any,
        parallelism: int | None = None,
    ) -> Self:
        """Send each record to the task that a function chooses by the record's key.

        Parameters
        ----------
        partitioner
            A :class:`~flinkish_spark.stream_functions.Partitioner`, or a function of a key and the number of
            tasks that returns a task's number, from 0. The same for the same key, in every process.
        key
            Name of a field, a function of a record, or an instance of a
            :class:`~flinkish_spark.stream_functions.KeySelector`.
        parallelism
            Number of tasks; as many as Spark has shuffle partitions if left out.

        Raises
        ------
        ConfigError
            It is no number of tasks.
        GraphError, UserFunctionError
            One of the two is no function, or cannot be sent to the workers; or the stream is a union, of
            which each stream would have tasks of its own.

        Notes
        -----
        A function that raises, or returns no task, stops the job with the record's topic, partition and
        offset. State is not kept by these tasks: `key_by` behind it distributes anew.
        """
        self._refuse_union("partition_custom")
        return self._behind(
            by_partitioner(partitioner, key, said_parallelism("partition_custom", parallelism))
        )
