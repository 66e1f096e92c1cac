"""Functions of users: what they derive from."""

import lazy_loader

#: For one more version: names that had their place here are public in `flinkish_spark`.
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "keyed": [
            "AggregateFunction",
            "BroadcastProcessFunction",
            "FilterFunction",
            "FlatMapFunction",
            "KeyedBroadcastProcessFunction",
            "KeyedCoProcessFunction",
            "KeyedProcessFunction",
            "MapFunction",
            "ReduceFunction",
            "RichFunction",
        ]
    },
)
