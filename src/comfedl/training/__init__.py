"""``fit``: the loop of rounds, its callbacks, and the folder of a run."""
