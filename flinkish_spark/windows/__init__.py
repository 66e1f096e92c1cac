"""Windows of keyed streams: assigners, triggers, evictors and window functions.

`flinkish_spark/operators/windowing.py` runs them; docs/windows.md explains them.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.windows", __file__)
