"""Public test tools: programs step by step, a broker, a cluster, crash points, cases for sinks.

Names are imported when they are first used: a test that starts a broker needs nothing of the harness.
"""

import lazy_loader

from flinkish_spark.moved import with_moved_names

_listed, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.testing", __file__)
__getattr__ = with_moved_names(__name__, _listed)
