"""`penstock/materialize-sqlite`."""
