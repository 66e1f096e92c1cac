"""Patterns in streams: what is looked for, its automaton, and the matcher. Knows nothing of Spark.

docs/cep.md explains them. `__init__.pyi` lists the public names, which are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
