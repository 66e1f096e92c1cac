"""Spark glue: control source, keyed operator, epoch writer, recovery, supervisor."""
