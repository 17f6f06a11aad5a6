"""``fit``: the training loop, its callbacks, and the run folder."""
