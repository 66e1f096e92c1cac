"""PyFlink's names of `pyflink.datastream`, and of its modules of windows and state."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.pyflink.datastream", __file__)
