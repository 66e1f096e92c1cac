"""flinkish_spark: exactly-once checkpoints for PySpark Structured Streaming.

The public API is the exported names of this package and of its modules `windows`, `state`, `sources`,
`sinks`, `joins`, `cep`, `testing`, `latency` and `state_processor`; everything else may change.
`__init__.pyi` lists the names of this package. They are imported on first use: Spark's Python workers import
this package, too, and need little of it.
"""

import warnings

import lazy_loader

from flinkish_spark.core.suggestions import find_misspelt_names
from flinkish_spark.core.version import __version__ as __version__
from flinkish_spark.wings import register_parts

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
find_misspelt_names()
register_parts()
# kafka-python reads its message schemas with a call that Python 3.11 has deprecated, a hundred times.
_OF = r"(kafka|importlib\.resources)\."
warnings.filterwarnings("ignore", r"(read_text|open_text) is deprecated", DeprecationWarning, _OF)
