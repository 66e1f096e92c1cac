"""Jobs chained by a Kafka topic, whose checkpoints together are one consistent cut."""
