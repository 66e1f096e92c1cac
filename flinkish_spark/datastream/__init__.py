"""The DataStream API: what a user's program is written with."""
