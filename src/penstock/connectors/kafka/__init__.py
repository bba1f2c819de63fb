"""Topics of Apache Kafka as a source."""
