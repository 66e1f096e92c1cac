"""Formats: from the bytes of keys and values to columns and back, and a schema registry."""
