"""Joins of streams: what a program says about them.

`flinkish_spark/operators/` runs them; docs/joins.md explains them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.joins", __file__)
