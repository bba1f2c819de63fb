"""Generated protocol code; `make proto` writes it."""
