"""Sources beside Kafka, and what there is to say about their limits and ends; see `docs/sources.md`.

Names are imported when they are first used: Spark's Python workers import this package too. `base` is the
contract that all sources fulfil, `splits` what a user derives from.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from flinkish_spark.sources.collection import CollectionSource
    from flinkish_spark.sources.delta_changes import DeltaSource
    from flinkish_spark.sources.delta_kinds import DeltaChanges
    from flinkish_spark.sources.delta_records import DeltaRecordsSource
    from flinkish_spark.sources.delta_table import DeltaTableSource
    from flinkish_spark.sources.file_formats import (
        CsvFiles,
        CsvHeader,
        InputFormat,
        JsonLines,
        ParquetFiles,
        TextLines,
    )
    from flinkish_spark.sources.files import Discovery, FileSource
    from flinkish_spark.sources.generated import (
        Counting,
        Field,
        RandomChoice,
        RandomDouble,
        RandomLong,
        RandomText,
        Times,
    )
    from flinkish_spark.sources.generator import DataGeneratorSource
    from flinkish_spark.sources.hybrid import HybridSource
    from flinkish_spark.sources.kafka_beginnings import StartAtCommitted, StartAtOffsets, StartAtTimestamp
    from flinkish_spark.sources.kafka_ends import EndAtLatest, EndAtOffsets, EndAtTimestamp
    from flinkish_spark.sources.kafka_records import KafkaRecordsSource
    from flinkish_spark.sources.rates import RateLimit
    from flinkish_spark.sources.socket_text import SocketTextSource
    from flinkish_spark.sources.splits import SourceUnavailable, SplitSource

#: Module -> the names it gives.
_PUBLIC = {
    "collection": ("CollectionSource",),
    "delta_changes": ("DeltaSource",),
    "delta_kinds": ("DeltaChanges",),
    "delta_records": ("DeltaRecordsSource",),
    "delta_table": ("DeltaTableSource",),
    "file_formats": (
        "CsvFiles",
        "CsvHeader",
        "InputFormat",
        "JsonLines",
        "ParquetFiles",
        "TextLines",
    ),
    "files": ("Discovery", "FileSource"),
    "generated": (
        "Counting",
        "Field",
        "RandomChoice",
        "RandomDouble",
        "RandomLong",
        "RandomText",
        "Times",
    ),
    "generator": ("DataGeneratorSource",),
    "hybrid": ("HybridSource",),
    "kafka_beginnings": (
        "StartAtCommitted",
        "StartAtOffsets",
        "StartAtTimestamp",
    ),
    "kafka_ends": (
        "EndAtLatest",
        "EndAtOffsets",
        "EndAtTimestamp",
    ),
    "kafka_records": ("KafkaRecordsSource",),
    "rates": ("RateLimit",),
    "socket_text": ("SocketTextSource",),
    "splits": (
        "SourceUnavailable",
        "SplitSource",
    ),
}
_MODULES = {name: module for module, names in _PUBLIC.items() for name in names}

__all__ = [
    "CollectionSource",
    "Counting",
    "CsvFiles",
    "CsvHeader",
    "DataGeneratorSource",
    "DeltaChanges",
    "DeltaRecordsSource",
    "DeltaSource",
    "DeltaTableSource",
    "Discovery",
    "EndAtLatest",
    "EndAtOffsets",
    "EndAtTimestamp",
    "Field",
    "FileSource",
    "HybridSource",
    "InputFormat",
    "JsonLines",
    "KafkaRecordsSource",
    "ParquetFiles",
    "RandomChoice",
    "RandomDouble",
    "RandomLong",
    "RandomText",
    "RateLimit",
    "SocketTextSource",
    "SourceUnavailable",
    "SplitSource",
    "StartAtCommitted",
    "StartAtOffsets",
    "StartAtTimestamp",
    "TextLines",
    "Times",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'flinkish_spark.sources' has no attribute {name!r}")
    value = getattr(import_module(f"flinkish_spark.sources.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
