"""Side outputs with PyFlink's types."""

from __future__ import annotations

from flinkish_spark.core import elements
from flinkish_spark.pyflink.common.typeinfo import PICKLED, TypeInformation


class OutputTag:
    """A side output: ``OutputTag("late", Types.STRING())``."""

    def __init__(self, tag_id: str, type_info: TypeInformation | None = None) -> None:
        self.tag_id, self.type_info = tag_id, PICKLED if type_info is None else type_info

    def own(self, info: TypeInformation | None = None) -> elements.OutputTag:
        return elements.OutputTag(self.tag_id, (info or self.type_info).fields)
