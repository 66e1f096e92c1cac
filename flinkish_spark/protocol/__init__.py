"""The checkpoint protocol as values, tables and pure functions.

Nothing in here knows Spark, Kafka, a clock or a file: facts come in, decisions go out. The
coordinator and the recovery read the facts, ask these modules, persist, and then act.
"""
