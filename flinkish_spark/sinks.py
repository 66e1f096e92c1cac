"""Sinks that commit with a checkpoint, and what there is to say about them.

Names are imported when they are first used. What a sink of one's own derives from is
:class:`TwoPhaseCommitSink`; `sinks.pyi` lists the names.
"""

import lazy_loader

#: Without it a misspelt import from here would not be looked for, and nobody could say what was meant.
__path__: list[str] = []

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark", __file__)
