"""What happens to one key group in one micro-batch: state, timers, windows. Knows nothing of Spark.

An operator here sees elements, a watermark and a processing time, and emits elements; where they come
from and where its state is kept is others' concern (`flinkish_spark/worker/keyed_operator.py`).
`tests.support.operator_harness` runs it step by step.
"""
