"""For authors of connectors: the connector suite, and real servers to run it against."""
