"""From a program to Spark's plan: the stream graph, what is checked in it, and its planner."""
