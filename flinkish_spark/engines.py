"""Which side of Spark does a connector's work."""

from __future__ import annotations

import enum

from flinkish_spark.errors import ConfigError


class Engine(enum.Enum):
    """Who reads or writes.

    Both sides leave the same things behind: offsets of one can be continued, and committables of
    one committed, by the other.
    """

    #: Spark's native source, and the writer in this package's JAR. Faster, needs JARs.
    JVM = "jvm"
    #: Pure Python on kafka-python; needs no JAR.
    PYTHON = "python"

    @classmethod
    def of(cls, value: str | Engine, setting: str) -> Engine:
        """Return the engine that a user named.

        Raises
        ------
        ConfigError
            There is none of that name.
        """
        try:
            return cls(value)
        except ValueError:
            raise ConfigError(f"{setting} is {value!r}", what_to_do='use "jvm" or "python"') from None
