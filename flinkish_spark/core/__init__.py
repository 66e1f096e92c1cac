"""What everybody needs and what needs nobody: errors, clock, store, job directory, settings."""
