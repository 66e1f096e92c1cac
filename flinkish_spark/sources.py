"""Sources of streams, and what there is to say about their limits and ends; see `docs/sources.md`.

Names are imported when they are first used; `sources.pyi` lists them. What a source of one's own derives from
is :class:`SplitSource`.
"""

import lazy_loader

#: Without it a misspelt import from here would not be looked for, and nobody could say what was meant.
__path__: list[str] = []

__getattr__, __dir__, __all__ = lazy_loader.attach_stub("flinkish_spark", __file__)
