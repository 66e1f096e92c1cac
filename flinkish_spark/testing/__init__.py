"""Public test tools: harnesses for programs, a broker, a cluster, crash points, test cases for sinks.

Names are imported on first use: a test that starts a broker does not import the harness.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.testing", __file__)
