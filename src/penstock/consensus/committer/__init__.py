"""One process owns the database; everybody else shares it."""
