"""``python -m comfedl``."""

from comfedl.cli.main import main

main()
