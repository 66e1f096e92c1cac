"""The package that touches py4j and Spark's internals.

Everything else asks these functions; what they find missing becomes one clear error here.
"""
