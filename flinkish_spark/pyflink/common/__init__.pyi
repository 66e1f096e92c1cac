"""PyFlink's names of `pyflink.common`."""

from .configuration import Configuration as Configuration
from .time import Duration as Duration
from .time import Time as Time
from .typeinfo import TypeInformation as TypeInformation
from .typeinfo import Types as Types
from .types import Row as Row
from .watermark_strategy import TimestampAssigner as TimestampAssigner
from .watermark_strategy import WatermarkStrategy as WatermarkStrategy
