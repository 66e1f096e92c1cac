"""Sources and sinks: one folder or file per system, none of which knows another."""
