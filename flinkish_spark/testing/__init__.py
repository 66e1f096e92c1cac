"""Public test tools: a real local broker, and crash points."""

from flinkish_spark.testing.broker import LocalBroker
from flinkish_spark.testing.crashing import KillAt

__all__ = ["KillAt", "LocalBroker"]
