"""The environment of a PyFlink program: one of ours, made by defaults that the program does not say."""

from __future__ import annotations

import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any, Self

from pyspark.sql import types as T

from flinkish_spark.core.config import CheckpointingMode as CheckpointingMode
from flinkish_spark.core.elements import TimeDomain as TimeDomain
from flinkish_spark.datastream import environment as own
from flinkish_spark.job.configuration import read_outside
from flinkish_spark.pyflink.common.configuration import Configuration
from flinkish_spark.pyflink.common.typeinfo import PICKLED, SourceRecord, TypeInformation, infer_type
from flinkish_spark.pyflink.datastream.data_stream import DataStream
from flinkish_spark.pyflink.datastream.state import same


class RuntimeExecutionMode(Enum):
    """How a program says that its input ends; here a job whose sources end is over in any mode."""

    STREAMING, BATCH, AUTOMATIC = range(3)


LOG = logging.getLogger(__name__)

#: The keys of a program that say where the directories of jobs are.
_FOLDERS = ("execution.checkpointing.dir", "state.checkpoints.dir")


def _make_environment(settings: Configuration) -> own.StreamExecutionEnvironment:
    outside = read_outside()
    script = Path(sys.argv[0]).stem if sys.argv and sys.argv[0] else ""
    named = "" if "pipeline.name" in outside else script
    job = re.sub(r"[^A-Za-z0-9_.-]", "-", settings.get_string("pipeline.name", named)).strip("-._")
    if not job:
        job = outside["pipeline.name"].text if "pipeline.name" in outside else "job"
    folder = next((one for one in (settings.get_string(key, "") for key in _FOLDERS) if one), "")
    if not folder and ("job-dir" in outside or "execution.checkpointing.dir" in outside):
        return own.StreamExecutionEnvironment.get_execution_environment(job)
    if not folder:
        folder = tempfile.mkdtemp(prefix="flinkish-")
        LOG.warning(
            "the job '%s' keeps its state in %s, which the next start does not find; "
            "set FLINKISH_EXECUTION_CHECKPOINTING_DIR to a directory",
            job,
            folder,
        )
    return own.StreamExecutionEnvironment.get_execution_environment(job, f"{folder.rstrip('/')}/{job}")


class StreamExecutionEnvironment:
    """The environment of a program, with PyFlink's methods."""

    #: Makes an environment of ours; tests put their own here.
    make_environment: Callable[[Configuration], Any] = staticmethod(_make_environment)

    def __init__(self, environment: Any) -> None:
        self._environment = environment

    @classmethod
    def get_execution_environment(cls, configuration: Configuration | None = None) -> Self:
        return cls(cls.make_environment(configuration or Configuration()))

    @property
    def graph(self) -> Any:
        return self._environment.graph

    def _ignore(self, *_: Any, **__: Any) -> Self:
        return self

    set_parallelism = set_runtime_mode = set_buffer_timeout = disable_operator_chaining = _ignore
    get_config = configure = set_state_backend = set_restart_strategy = add_jars = add_classpaths = _ignore
    set_stream_time_characteristic = _ignore

    def get_parallelism(self) -> int:
        return int(self._environment._partitions())

    def set_max_parallelism(self, max_parallelism: int) -> Self:
        self._environment.set_max_parallelism(max_parallelism)
        return self

    def enable_checkpointing(self, interval: int, mode: Any = None) -> Self:
        self._environment.checkpoint = replace(self._environment.checkpoint, interval_ms=interval)
        return self

    def add_python_file(self, file_path: str) -> None:
        self._environment.add_python_file(file_path)

    def from_collection(
        self, collection: Iterable[Any], type_info: TypeInformation | None = None
    ) -> DataStream:
        values = list(collection)
        info = infer_type(values) if type_info is None else type_info
        rows = [info.to_row(value) for value in values]
        uid = self.graph.derive_uid("source", ["collection"])
        return DataStream(self, self._environment.from_collection(rows, info.fields, uid=uid), info)

    def from_source(
        self,
        source: Any,
        watermark_strategy: Any,
        source_name: str,
        type_info: TypeInformation | None = None,
    ) -> DataStream:
        uid = re.sub(r"[^A-Za-z0-9_.-]", "-", source_name)
        own = self._environment.from_source(source, uid=uid)
        stream = DataStream(self, own, SourceRecord(T.NullType()))
        # Times first: a channel is then still the source's own.
        if watermark_strategy is not None:
            stream = stream.assign_timestamps_and_watermarks(watermark_strategy)
        return stream.map(same, PICKLED if type_info is None else type_info)

    def execute(self, job_name: str | None = None) -> Any:
        return self._environment.execute()

    def execute_async(self, job_name: str | None = None) -> Any:
        return self._environment.execute_async()
