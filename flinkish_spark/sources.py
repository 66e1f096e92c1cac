"""Sources of streams, and their settings; see `docs/sources.md`.

Names are imported on first use; `sources.pyi` lists them. Derive your own source from :class:`SplitSource`.
"""

import lazy_loader

#: Without `__path__` a misspelt import from here would get no suggestion.
__path__: list[str] = []

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark", __file__)
