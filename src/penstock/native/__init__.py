"""The same meaning as the model, as Spark expressions, each proven equal to it."""
