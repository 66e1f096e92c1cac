"""The package that touches py4j and Spark's internals.

All other packages call these functions, which turn missing internals into clear errors.
"""
