"""State descriptors with PyFlink's types, and states whose values are those of the program."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from functools import cached_property
from typing import Any, ClassVar, Self

from flinkish_spark.pyflink.common.typeinfo import PICKLED, TypeInformation, map_key
from flinkish_spark.state import descriptors
from flinkish_spark.state.states import AggregatingState as AggregatingState
from flinkish_spark.state.states import ListState as ListState
from flinkish_spark.state.states import MapState as MapState
from flinkish_spark.state.states import ReducingState as ReducingState
from flinkish_spark.state.states import ValueState as ValueState


class StateTtlConfig:
    """The time to live of a state: ``StateTtlConfig.new_builder(Time.seconds(5)).build()``."""

    UpdateType = descriptors.TtlUpdate
    _update = UpdateType.ON_CREATE_AND_WRITE

    def __init__(self, ttl: Any) -> None:
        self._ttl = ttl

    @classmethod
    def new_builder(cls, ttl: Any) -> Self:
        return cls(ttl)

    def set_update_type(self, update_type: Any) -> Self:
        self._update = update_type
        return self

    def update_ttl_on_create_and_write(self) -> Self:
        return self.set_update_type(self.UpdateType.ON_CREATE_AND_WRITE)

    def update_ttl_on_read_and_write(self) -> Self:
        return self.set_update_type(self.UpdateType.ON_READ_AND_WRITE)

    def _ignore(self, *_: Any) -> Self:
        # Expired values are never returned, and are removed in time by themselves.
        return self

    never_return_expired = use_processing_time = cleanup_full_snapshot = cleanup_incrementally = _ignore
    cleanup_in_rocksdb_compact_filter = disable_cleanup_in_background = build = _ignore

    @property
    def ttl(self) -> descriptors.StateTtl:
        return descriptors.StateTtl(self._ttl, self._update)


class StateDescriptor:
    """The name and the types of a state."""

    #: The method of a context that returns the state, our descriptor, and the state with PyFlink's values.
    method: ClassVar[str]
    kind: ClassVar[Any]
    state: ClassVar[Any]
    _ttl: descriptors.StateTtl | None = None
    #: The function of our descriptor, if it has one.
    _function: tuple[Any, ...] = ()

    def __init__(self, name: str, *types: TypeInformation) -> None:
        self.name, self.types = name, types

    def get_name(self) -> str:
        return self.name

    def enable_time_to_live(self, ttl_config: StateTtlConfig) -> None:
        self._ttl = ttl_config.ttl

    @cached_property
    def own(self) -> Any:
        return self.kind(self.name, *self._function, *(one.data_type for one in self.types), ttl=self._ttl)

    def wrap(self, state: Any) -> Any:
        return self.state(state, *self.types)


def find_state(context: Any, descriptor: StateDescriptor) -> Any:
    return descriptor.wrap(getattr(context, descriptor.method)(descriptor.own))


class _RichFunction:
    _function: Any

    def open(self, context: Any) -> None:
        if hasattr(self._function, "open"):
            self._function.open(context)

    def close(self) -> None:
        if hasattr(self._function, "close"):
            self._function.close()


class EncodedReduce(_RichFunction):
    def __init__(self, reduce: Any, encode: Any, decode: Any) -> None:
        self._function, self._encode, self._decode = reduce, encode, decode

    def reduce(self, first: Any, second: Any) -> Any:
        reduce = getattr(self._function, "reduce", self._function)
        return self._encode(reduce(self._decode(first), self._decode(second)))


class EncodedAggregate(_RichFunction):
    def __init__(self, aggregate: Any, decode: Any, info: TypeInformation, encode: Any) -> None:
        self._function, self._decode, self._info, self._encode = aggregate, decode, info, encode

    def create_accumulator(self) -> Any:
        return self._info.encode(self._function.create_accumulator())

    def add(self, value: Any, accumulator: Any) -> Any:
        return self._info.encode(self._function.add(self._decode(value), self._info.decode(accumulator)))

    def get_result(self, accumulator: Any) -> Any:
        return self._encode(self._function.get_result(self._info.decode(accumulator)))

    def merge(self, first: Any, second: Any) -> Any:
        return self._info.encode(self._function.merge(self._info.decode(first), self._info.decode(second)))


class _State:
    def __init__(self, state: Any, info: TypeInformation) -> None:
        self._state, self._info = state, info
        self.clear = state.clear


class _Value(_State):
    def value(self) -> Any:
        stored = self._state.value()
        return None if stored is None else self._info.decode(stored)

    def update(self, value: Any) -> None:
        self._state.update(None if value is None else self._info.encode(value))


class _List(_State):
    def get(self) -> Iterator[Any]:
        return map(self._info.decode, self._state.get())

    __iter__ = get

    def add(self, value: Any) -> None:
        self._state.add(self._info.encode(value))

    def add_all(self, values: Iterable[Any]) -> None:
        self._state.add_all([self._info.encode(one) for one in values])

    def update(self, values: Iterable[Any]) -> None:
        self._state.update([self._info.encode(one) for one in values])


class _Map(MutableMapping[Any, Any]):
    def __init__(self, state: Any, key: TypeInformation, value: TypeInformation) -> None:
        self._state, self._key, self._value = state, key, value

    def __getitem__(self, key: Any) -> Any:
        return self._value.decode(self._state[self._key.encode(key)])

    def __setitem__(self, key: Any, value: Any) -> None:
        self._state[self._key.encode(key)] = self._value.encode(value)

    def __delitem__(self, key: Any) -> None:
        del self._state[self._key.encode(key)]

    def __iter__(self) -> Iterator[Any]:
        return map(self._key.decode, list(self._state))

    def __len__(self) -> int:
        return len(self._state)

    def contains(self, key: Any) -> bool:
        return key in self

    def remove(self, key: Any) -> None:
        self.pop(key, None)

    def is_empty(self) -> bool:
        return not len(self)

    put, put_all = __setitem__, MutableMapping.update


class _ReducingValue(_List):
    def get(self) -> Any:
        stored = self._state.get()
        return None if stored is None else self._info.decode(stored)


class _AggregatingValue(_State):
    def __init__(self, state: Any, info: TypeInformation) -> None:
        super().__init__(state, info)
        # Only accumulators are stored, and the function encodes them.
        self.add, self.get = state.add, state.get


class ValueStateDescriptor(StateDescriptor):
    """A value: ``ValueStateDescriptor("total", Types.LONG())``."""

    method, kind, state = "get_state", descriptors.ValueStateDescriptor, _Value

    def __init__(self, name: str, value_type_info: TypeInformation = PICKLED) -> None:
        super().__init__(name, value_type_info)


class ListStateDescriptor(StateDescriptor):
    """A list: ``ListStateDescriptor("seen", Types.STRING())``."""

    method, kind, state = "get_list_state", descriptors.ListStateDescriptor, _List

    def __init__(self, name: str, elem_type_info: TypeInformation = PICKLED) -> None:
        super().__init__(name, elem_type_info)


class MapStateDescriptor(StateDescriptor):
    """A map: ``MapStateDescriptor("counts", Types.STRING(), Types.LONG())``."""

    method, kind, state = "get_map_state", descriptors.MapStateDescriptor, _Map

    def __init__(
        self, name: str, key_type_info: TypeInformation = PICKLED, value_type_info: TypeInformation = PICKLED
    ) -> None:
        super().__init__(name, map_key(key_type_info), value_type_info)


class ReducingStateDescriptor(StateDescriptor):
    """A value that a function makes of all that are added."""

    method, kind, state = "get_reducing_state", descriptors.ReducingStateDescriptor, _ReducingValue

    def __init__(self, name: str, reduce_function: Any, type_info: TypeInformation = PICKLED) -> None:
        super().__init__(name, type_info)
        self._function = (EncodedReduce(reduce_function, type_info.encode, type_info.decode),)


class AggregatingStateDescriptor(StateDescriptor):
    """An accumulator to which values are added."""

    method, kind, state = "get_aggregating_state", descriptors.AggregatingStateDescriptor, _AggregatingValue

    def __init__(self, name: str, agg_function: Any, state_type_info: TypeInformation = PICKLED) -> None:
        super().__init__(name, state_type_info)
        self._function = (EncodedAggregate(agg_function, same, state_type_info, same),)


def same(value: Any) -> Any:
    return value
