"""`penstock/materialize-postgres`."""
