"""PyFlink's DataStream API over ours: a program runs with `pyflink` replaced in its imports.

Module names are PyFlink's, so ``from pyflink.datastream import ...`` becomes
``from flinkish_spark.pyflink.datastream import ...``. docs/migrate/flink-programs.md says what runs.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.pyflink", __file__)
