"""The drop-in format: Spark's own `format("kafka")` with exactly-once writes, by changing one word."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flinkish_spark.connectors.kafka.format.data_source import FORMAT_NAME, FlinkishKafka, register
    from flinkish_spark.connectors.kafka.format.writer import settle

__all__ = ["FORMAT_NAME", "FlinkishKafka", "register", "settle"]


def __getattr__(name: str) -> Any:
    # Lazy: Spark's processes that plan a source import this package, and do not need the writer.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    place = "writer" if name == "settle" else "data_source"
    return getattr(import_module(f"{__name__}.{place}"), name)
