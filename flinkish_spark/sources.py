"""Sources of streams, and what there is to say about their limits and ends; see `docs/sources.md`.

Names are imported when they are first used. What a source of one's own derives from is :class:`SplitSource`; `sources.pyi` lists the names.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark", __file__)
