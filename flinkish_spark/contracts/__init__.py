"""What a connector implements: the contracts of sources, sinks, manifests and hooks."""
