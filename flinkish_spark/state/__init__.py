"""Keyed state that a function declares in `open` and uses while it processes an element or a timer.

State belongs to the current key; it is stored with the checkpoint and comes back after a crash as it
was when the micro-batch of the last kept checkpoint ended.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark.state", __file__)
