"""Jobs that are chained over a Kafka topic: checkpoints of both that are one consistent cut."""
