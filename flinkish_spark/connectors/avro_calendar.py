"""Check of the calendar in which Spark writes dates and times to Avro."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from pyspark.sql import types as T

from flinkish_spark.core.errors import ConfigError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: Spark's setting for the calendar of days before October 1582 and times before 1900.
_CALENDAR = "spark.sql.avro.datetimeRebaseModeInWrite"
#: Finds dates and times in the text of a struct type.
_TIMES = re.compile(r"[:<,](?:date|timestamp)[,>]")


def check_calendar(spark: SparkSession, fields: T.StructType, whose: str) -> None:
    """Refuse a session whose settings would change days or times of records."""
    if (calendar := str(spark.conf.get(_CALENDAR))) != "CORRECTED" and _TIMES.search(fields.simpleString()):
        raise ConfigError(
            f"{whose} is Avro with times, and the Spark session has {_CALENDAR}={calendar}",
            why="Spark would write other days before 1582 and times before 1900, or end the task at them",
            what_to_do=f"leave {_CALENDAR} out, or set it to CORRECTED",
        )
