"""Interfaces for connectors: sources, sinks, manifests and master hooks."""
