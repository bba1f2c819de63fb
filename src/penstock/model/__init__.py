"""Pure values and their algebra, without IO, a clock or Spark."""
