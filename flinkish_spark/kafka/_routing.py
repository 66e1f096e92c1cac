"""Which topic and partition every record goes to: whole columns in, columns per partition out.

The rules are those of Kafka's Java producer: an explicit partition wins, then the key decides
(murmur2), and records without key fill one partition with a batch's worth before they turn to the
next one, starting anywhere. Records of one partition keep their order.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from flinkish_spark.kafka import staging_faults as faults
from flinkish_spark.kafka._columns import Addressed, Rows, is_column
from flinkish_spark.kafka._wire_produce import TopicLayout
from flinkish_spark.kafka.partitioning import partitions_for_keys
from flinkish_spark.kafka.record_batch import Int64s, lengths

#: What a record takes beside key and value, about; only the spreading goes by it.
_ABOUT_OVERHEAD_BYTES = 16
_NO_PARTITION = -1
#: Up to here partition numbers fit 16 bits, which numpy sorts ten times faster.
_FAST_SORT_PARTITIONS = 2**15


def by_topic(records: Addressed, default: str | None) -> Iterator[tuple[str, Addressed]]:
    """Yield the rows of each topic.

    Raises
    ------
    BadRecordError
        If a record names no topic and there is no default one.
    """
    topics = records.topics
    if not is_column(topics) or topics.null_count == len(topics):
        named = topics if isinstance(topics, str) else default
        if named is None:
            raise faults.no_topic()
        yield named, records
        return
    if topics.null_count:
        if default is None:
            raise faults.no_topic()
        topics = topics.fill_null(default)
    coded = topics.dictionary_encode()
    names, codes = coded.dictionary.to_pylist(), coded.indices.to_numpy(zero_copy_only=False)
    if len(names) == 1:
        yield names[0], replace(records, topics=names[0])
        return
    for code, name in enumerate(names):
        yield name, replace(records.take(np.flatnonzero(codes == code)), topics=name)


class Spreader:
    """Chooses partitions for the records without key, one batch's worth after the other.

    Parameters
    ----------
    run_bytes
        How much goes to one partition in a row.
    start
        Chooses below a number where a topic begins, so that small transactions do not all fill
        the same partition.
    """

    def __init__(self, run_bytes: int, start: Callable[[int], int] = random.randrange) -> None:
        self._run_bytes, self._start = run_bytes, start
        self._positions: dict[str, tuple[int, int]] = {}

    def spread(self, topic: str, sizes: Int64s, partitions: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return one of `partitions` for each record, given the bytes each takes."""
        position, filled = self._positions.get(topic) or (self._start(len(partitions)), 0)
        ends = filled + np.cumsum(sizes)
        runs = (ends - sizes) // self._run_bytes
        last = int(runs[-1])
        self._positions[topic] = (position + last, int(ends[-1]) - last * self._run_bytes)
        chosen: npt.NDArray[Any] = partitions[(position + runs) % len(partitions)]
        return chosen


def by_partition(
    topic: str, records: Addressed, layout: TopicLayout, spreader: Spreader
) -> Mapping[int, Rows]:
    """Return the rows of each partition of `topic`, in their order.

    Raises
    ------
    BadRecordError
        If a record names a partition that the topic does not have.
    """
    rows, count = records.rows, len(layout.leaders)
    chosen = _explicit(topic, records.partitions, len(rows), count)
    undecided = chosen == _NO_PARTITION
    if undecided.all():
        chosen = partitions_for_keys(rows.keys, count).astype(np.int64)
    elif undecided.any():
        by_key = partitions_for_keys(rows.keys, count)
        chosen[undecided] = by_key[undecided]
    keyless = chosen == _NO_PARTITION
    if keyless.any():
        sizes = np.maximum(lengths(rows.values), 0)[keyless] + _ABOUT_OVERHEAD_BYTES
        chosen[keyless] = spreader.spread(topic, sizes, _led(layout))
    return _grouped(rows, chosen, count)


def _explicit(topic: str, partitions: Any, records: int, count: int) -> Int64s:
    if partitions is None:
        return np.full(records, _NO_PARTITION, np.int64)
    given = ~partitions.is_null().to_numpy(zero_copy_only=False)
    named: Int64s = partitions.fill_null(_NO_PARTITION).to_numpy().copy()
    wrong = named[given & ((named < 0) | (named >= count))]
    if len(wrong):
        raise faults.no_such_partition(topic, int(wrong[0]), count)
    return named


def _led(layout: TopicLayout) -> npt.NDArray[Any]:
    """Return the partitions that have a leader, or all of them while none has."""
    leaders = np.array(layout.leaders)
    return np.flatnonzero(leaders >= 0) if (leaders >= 0).any() else np.arange(len(leaders))


def _grouped(rows: Rows, chosen: Int64s, count: int) -> Mapping[int, Rows]:
    sizes = np.bincount(chosen, minlength=count)
    used = np.flatnonzero(sizes)
    if len(used) == 1:
        return {int(used[0]): rows}
    narrow = np.int16 if count <= _FAST_SORT_PARTITIONS else np.int64
    # Stable: the records of a partition keep their order.
    ordered = rows.take(np.argsort(chosen.astype(narrow), kind="stable"))
    begins = np.concatenate(([0], np.cumsum(sizes)))
    return {int(p): ordered.slice(int(begins[p]), int(sizes[p])) for p in used}
