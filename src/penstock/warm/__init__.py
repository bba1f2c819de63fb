"""Commands that use the Spark of another process of their user, and start none."""
