"""What a Kafka source needs to follow the checkpoints of the job that writes its topics."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from flinkish_spark.chaining.cut_state import UPSTREAM_KEY
from flinkish_spark.drop_in import option_names as names
from flinkish_spark.engines import Engine
from flinkish_spark.errors import ConfigError, GraphError
from flinkish_spark.kafka.barrier_writer import is_compacted
from flinkish_spark.kafka.options import KafkaConnection
from flinkish_spark.kafka.wire_pool import WIRES, WirePool
from flinkish_spark.protocol.gate_values import AlignmentMode
from flinkish_spark.sources.kafka_places import NO_CONTROL

if TYPE_CHECKING:
    from flinkish_spark.chaining.upstream import UpstreamJob
    from flinkish_spark.sources.base import SourceStart

#: Barrier records are no records of the stream, also of a job that does not follow them.
SKIP = {names.BARRIER_RECORDS: "skip"}


def check_upstream(
    upstream: UpstreamJob | None, reader: Engine, has_side_outputs: bool, reads_some: bool
) -> None:
    """Refuse settings of a source that cannot be aligned; called when the source is made."""
    if upstream is None:
        return
    if reader is not Engine.PYTHON:
        raise ConfigError(
            "aligned_with needs the Python reader",
            why="Spark's own Kafka source cannot stop at a barrier record",
            what_to_do='add reader="python"',
        )
    if reads_some:
        raise ConfigError(
            "aligned_with and partitions, or a pattern, are set for one source",
            why="a cut of the upstream job has a barrier in every partition of topics that are named",
            what_to_do="name the topics, and leave out partitions; or leave out aligned_with",
        )
    if has_side_outputs:
        raise ConfigError(
            "aligned_with and a dead-letter topic are set for one source",
            why="unreadable records are read by a second scan, which ends elsewhere than the cut",
            what_to_do="choose OnBadRecord.FAIL or OnBadRecord.DROP",
        )


def check_alignable(upstream: UpstreamJob | None, reader: Engine, uid: str) -> None:
    """Refuse to hold back partitions of a source whose reader cannot; called before anything starts."""
    if reader is not Engine.PYTHON:
        raise GraphError(
            f"the source '{uid}' cannot be aligned with others",
            why="Spark's own Kafka source cannot hold back a partition that is ahead",
            what_to_do='read it with KafkaSource(..., reader="python"), or leave '
            "with_watermark_alignment() out and set max_offsets_per_trigger",
            uid=uid,
        )
    if upstream is not None:
        raise GraphError(
            f"the source '{uid}' follows an upstream job, and has with_watermark_alignment()",
            why="a partition that is held back would never come to the barrier for which the others wait",
            what_to_do="leave out with_watermark_alignment() or aligned_with",
            uid=uid,
        )


def check_alone(upstream: UpstreamJob | None, control_path: str) -> None:
    """Refuse a plan in which other sources decide where barriers are; called by the planner."""
    if upstream is not None and Path(control_path).name != NO_CONTROL:
        raise GraphError(
            "a source with aligned_with is not the only source of its job",
            why="each source would draw a checkpoint at a place of its own, and no cut would be one",
            what_to_do="read all topics of the upstream job with one source, or leave aligned_with out",
        )


def check_policies(
    upstream: UpstreamJob | None, connection: KafkaConnection, topics: Sequence[str], pool: WirePool = WIRES
) -> None:
    """Refuse to draw cuts ahead of barriers in topics that lose them; called by the preflight."""
    if upstream is None or upstream.mode in (AlignmentMode.ALIGNED, AlignmentMode.AT_LEAST_ONCE):
        return
    with pool.wire(connection) as wire:
        compacted = next((topic for topic in topics if is_compacted(wire, topic)), None)
    if compacted is not None:
        raise ConfigError(
            f"the topic '{compacted}' is compacted, and its source has AlignmentMode.{upstream.mode.name}",
            why="compaction may remove a barrier record after the checkpoint was drawn ahead of it, which "
            "then names a cut that is none",
            what_to_do="use AlignmentMode.ALIGNED, or a topic with cleanup.policy=delete",
            topic=compacted,
        )


def reader_options(upstream: UpstreamJob | None, start: SourceStart | None) -> dict[str, str]:
    """Return the options of the Python reader that make it follow the upstream job.

    Parameters
    ----------
    start
        Where the source begins in a lineage that was seeded: there it is between the same cuts.
    """
    if upstream is None:
        return {}
    options = {names.UPSTREAM: upstream.to_option()}
    if start is not None and UPSTREAM_KEY in start.position:
        options[names.UPSTREAM_START] = json.dumps(start.position)
    return options
