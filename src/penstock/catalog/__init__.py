"""YAML to built specs, without starting Spark."""
