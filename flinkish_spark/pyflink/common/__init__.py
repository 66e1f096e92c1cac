"""PyFlink's names of `pyflink.common`."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.pyflink.common", __file__)
