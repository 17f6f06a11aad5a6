"""Compares rounds of comfedl, of other frameworks and of plain loops: ``python -m benchmarks.peers``.

The driver (``driver.py``) starts a process per peer, all pinned to one core with one thread, and makes them take turns.
A worker (``worker.py``) passes a ``Pace`` (``pace.py``) to its peer's training loop, which calls it at the end of every
round and thereby waits for its next turn. ``roster.py`` lists the peers and what each cannot do, ``venvs.py`` creates
their environments, ``report.py`` and ``figure.py`` write the results.
"""
