"""`python -m penstock`, where the script is not on the path."""

from penstock.cli.main import main

main()
