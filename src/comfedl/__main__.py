"""``python -m comfedl``."""

from comfedl.cli import main

main()
