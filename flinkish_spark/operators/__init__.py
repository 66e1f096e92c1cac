"""Operators: one key group in one micro-batch, with state, timers and windows. Independent of Spark.

An operator sees elements, a watermark and a processing time, and emits elements.
`flinkish_spark/worker/keyed_operator.py` reads the elements from Spark and keeps the state.
`tests.support.operator_harness` runs it step by step.
"""
