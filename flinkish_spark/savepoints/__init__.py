"""Savepoints: a checkpoint that the user owns, in a form that any job with the same uids can take."""
