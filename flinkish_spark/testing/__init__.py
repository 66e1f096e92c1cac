"""Public test tools: a real local broker, crash points, harnesses."""
