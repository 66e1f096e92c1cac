"""The lowest layer, which all others import: errors, clock, store, job directory, settings."""
