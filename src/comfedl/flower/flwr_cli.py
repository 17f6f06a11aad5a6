"""Runs several ``flwr`` commands, given as a JSON list of argument lists, in one process: each start takes seconds."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from flwr.cli.app import app

    for arguments in json.loads(sys.argv[1]):
        app(arguments, standalone_mode=False)


if __name__ == "__main__":
    main()
