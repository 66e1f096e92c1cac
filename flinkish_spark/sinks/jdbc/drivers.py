"""Database drivers are extras: they are imported when they are used."""

from __future__ import annotations

from typing import Self

from flinkish_spark.errors import EnvironmentFault


class DriverMissing(EnvironmentFault):
    """The Python driver of a database is not installed."""

    @classmethod
    def of(cls, system: str, module: str, extra: str) -> Self:
        """Return the error for a driver's module and the extra of this package that brings it."""
        return cls(
            f"there is no Python driver for {system}",
            why=f"the module {module} cannot be imported",
            what_to_do=f"pip install 'flinkish-spark[{extra}]'",
        )
