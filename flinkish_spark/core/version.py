"""The version of this package; the build reads it from here without an import."""

__version__ = "0.1.0"
