"""An existing streaming DataFrame as a source of a job, with whatever Spark keeps state for."""

from __future__ import annotations

from dataclasses import dataclass

from pyspark.sql import DataFrame, SparkSession

from flinkish_spark.bridge.plans import (
    APPEND,
    UPDATE,
    add_row_kind,
    check_output_mode,
    native_parts,
    why_not_streamed,
)
from flinkish_spark.bridge.session import streaming_options, streaming_sources
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
    output_mode: str = APPEND
    has_channels = False

    def __post_init__(self) -> None:
        if not self.frame.isStreaming:
            raise GraphError("from_dataframe() got a batch DataFrame", what_to_do="use spark.readStream")
        check_output_mode(self.output_mode)
        check_field_names(
            add_row_kind(self.frame, self.output_mode).schema, "the DataFrame of from_dataframe()"
        )
        for name in streaming_sources(self.frame):
            bare = name.removeprefix("FileSource[").lower()
            if not name.startswith("FileSource") and bare not in map(str.lower, REPLAYABLE):
                raise GraphError(
                    f"the DataFrame reads the source '{name}', which cannot be replayed",
                    why="after a crash the same offsets must give the same rows again",
                    what_to_do=f"read from one of {', '.join(sorted(REPLAYABLE))}",
                )
        why = why_not_streamed(self.frame, native_parts(self.frame), self.output_mode)
        if why:
            raise GraphError(
                "Spark cannot run the DataFrame of from_dataframe() as a streaming query",
                why=why,
                what_to_do="change the query as for writeStream; an aggregate without a watermark needs "
                f"output_mode='{UPDATE}'",
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
        return add_position(add_row_kind(self.frame, self.output_mode))
