"""Several commands of ``flwr`` in one process, since each start of it takes seconds: a JSON list of lists of words."""

from __future__ import annotations

import json
import sys


def main() -> None:
    from flwr.cli.app import app

    for words in json.loads(sys.argv[1]):
        app(words, standalone_mode=False)


if __name__ == "__main__":
    main()
