"""An existing streaming DataFrame as a source of a job."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from flinkish_spark.bridge.session import stateful_parts, streaming_options, streaming_sources
from flinkish_spark.contracts.dataset import Dataset
from flinkish_spark.contracts.source import JobPlace, Source
from flinkish_spark.core.errors import GraphError
from flinkish_spark.transport.columns import add_position
from flinkish_spark.types.schemas import check_field_names

#: Spark sources that return the same rows for the same offsets, also after a crash.
REPLAYABLE = frozenset(
    {
        "kafka",
        "delta",
        "rate",
        "rate-micro-batch",
        "FileSource",
        "file",
        "text",
        "json",
        "csv",
        "parquet",
        "orc",
        "xml",
        "avro",
    }
)


@dataclass(frozen=True)
class DataFrameSource(Source):
    """Wraps a streaming DataFrame; `env.from_dataframe` makes it."""

    frame: DataFrame
    has_channels = False

    def __post_init__(self) -> None:
        if not self.frame.isStreaming:
            raise GraphError(
                "from_dataframe() got a batch DataFrame", what_to_do="use spark.readStream to make it"
            )
        check_field_names(self.frame.schema, "the DataFrame of from_dataframe()")
        for name in streaming_sources(self.frame):
            bare = name.removeprefix("FileSource[").lower()
            if not name.startswith("FileSource") and bare not in map(str.lower, REPLAYABLE):
                raise GraphError(
                    f"the DataFrame reads the source '{name}', which cannot be replayed",
                    why="after a crash the same offsets must give the same rows again",
                    what_to_do=f"read from one of {', '.join(sorted(REPLAYABLE))}",
                    source=name,
                )
        parts = stateful_parts(self.frame)
        if parts:
            raise GraphError(
                f"the DataFrame contains {parts[0]}",
                why="state and watermarks of Spark's own are not part of the job's checkpoints; refused are "
                "aggregates, dropDuplicates, withWatermark, limit, orderBy, stateful functions and "
                "joins of two streams",
                what_to_do="do that after the source, by key_by(...).process(...), or in a separate query",
                part=parts[0],
            )

    def datasets(self) -> tuple[Dataset, ...]:
        found: list[Dataset] = []
        for given in streaming_options(self.frame):
            options = {name.lower(): value for name, value in given.items()}
            topics = [one.strip() for one in options.get("subscribe", "").split(",") if one.strip()]
            found += Dataset.from_topics(options.get("kafka.bootstrap.servers", ""), topics)
            found += [Dataset.from_path(options["path"])] if "path" in options else []
        return tuple(dict.fromkeys(found))

    def load(self, spark: SparkSession, place: JobPlace) -> DataFrame:
        return add_position(self.frame)
