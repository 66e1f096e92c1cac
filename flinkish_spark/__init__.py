"""flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming.

The public API is what this package and `windows`, `state`, `sources`, `sinks`, `joins`, `cep`, `testing`,
`latency` and `state_processor` in it give by name; everything else may change. `__init__.pyi` lists the names
of this one. They are imported when they are first used: Spark's Python workers import this package too, and
need little of it.
"""

import warnings

import lazy_loader

from flinkish_spark.core.suggestions import find_misspelt_names

#: The build reads it from here, without importing anything.
__version__ = "0.1.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
find_misspelt_names()
# kafka-python reads its message schemas by a call that Python 3.11 has deprecated, a hundred times.
_OF = r"(kafka|importlib\.resources)\."
warnings.filterwarnings("ignore", r"(read_text|open_text) is deprecated", DeprecationWarning, _OF)
