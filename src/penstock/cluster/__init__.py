"""The cluster: everything of a catalog, run on and on in one process with one SparkSession."""
