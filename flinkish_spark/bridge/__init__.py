"""The package that touches py4j and Spark's internals.

Everything else asks these functions; what they find missing becomes one clear error here. Delta's internals
are opened up in :mod:`flinkish_spark.connectors.delta.transactions`.
"""

from flinkish_spark.bridge.session import (
    SparkProbe,
    describe_failure,
    is_gateway_gone,
    is_of_the_jvm,
    probe,
    said,
    stateful_parts,
    streaming_sources,
)

__all__ = [
    "SparkProbe",
    "describe_failure",
    "is_gateway_gone",
    "is_of_the_jvm",
    "probe",
    "said",
    "stateful_parts",
    "streaming_sources",
]
