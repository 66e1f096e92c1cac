"""The public names of :mod:`flinkish_spark.state`, and where they come from."""

from .descriptors import AggregatingStateDescriptor as AggregatingStateDescriptor
from .descriptors import ListStateDescriptor as ListStateDescriptor
from .descriptors import MapStateDescriptor as MapStateDescriptor
from .descriptors import ReducingStateDescriptor as ReducingStateDescriptor
from .descriptors import StateDescriptor as StateDescriptor
from .descriptors import StateTtl as StateTtl
from .descriptors import TtlUpdate as TtlUpdate
from .descriptors import ValueStateDescriptor as ValueStateDescriptor
from .states import AggregatingState as AggregatingState
from .states import ListState as ListState
from .states import MapState as MapState
from .states import ReducingState as ReducingState
from .states import ValueState as ValueState
