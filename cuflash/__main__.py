"""`python -m cuflash`: the command."""
from cuflash.cli.main import main

main()
