"""Async functions: what users derive from, the calls, and recorded answers; see docs/async.md."""
