"""The public names of :mod:`flinkish_spark.joins`, and where they come from."""

from .lookup import LookupCache as LookupCache
from .lookup import LookupJoin as LookupJoin
from .lookup import LookupTable as LookupTable
from .lookup import SqliteTable as SqliteTable
from .spec import Bound as Bound
from .spec import CoGroupFunction as CoGroupFunction
from .spec import Concatenate as Concatenate
from .spec import IntervalJoin as IntervalJoin
from .spec import JoinContext as JoinContext
from .spec import JoinType as JoinType
from .spec import ProcessJoinFunction as ProcessJoinFunction
from .spec import Side as Side
from .spec import TemporalJoin as TemporalJoin
from .spec import WindowCoGroup as WindowCoGroup
from .spec import WindowJoin as WindowJoin
