"""Sinks that commit with a checkpoint, and their settings.

Names are imported on first use; `sinks.pyi` lists them. Derive your own sink from
:class:`TwoPhaseCommitSink`.
"""

import lazy_loader

#: Without `__path__` a misspelt import from here would get no suggestion.
__path__: list[str] = []

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark", __file__)
