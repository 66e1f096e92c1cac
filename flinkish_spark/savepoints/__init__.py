"""Savepoints: a checkpoint that the user owns, in a form that any job with the same uids can take.

`export` writes one, `files` reads one, `restore` prepares a job directory with one, `rescale` does
the same with the job's own newest checkpoint, and `seed_source` brings the state into the first
micro-batch. What fits what is decided in `protocol/savepoints.py`.
"""
