"""Public test tools: programs step by step, a broker, a cluster, crash points, cases for sinks.

Names are imported when they are first used: a test that starts a broker needs nothing of the harness.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.testing", __file__)
