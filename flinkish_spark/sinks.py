"""Sinks that commit with a checkpoint, and what there is to say about them.

Names are imported when they are first used. What a sink of one's own derives from is
:class:`TwoPhaseCommitSink`; `sinks.pyi` lists the names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark", __file__)
