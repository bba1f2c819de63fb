"""Pure values and their algebra: the meaning of everything, without IO, a clock or Spark."""
