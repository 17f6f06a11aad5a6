"""Rounds of comfedl, of its peers and of plain loops, side by side: ``python -m benchmarks.peers``.

The driver (``driver.py``) starts one process for each peer, all pinned to one core with one thread, and lets them take
turns. A worker (``worker.py``) hands its peer's own training loop a ``Pace`` (``pace.py``), which the loop calls at the
end of every round and in which it waits for its next turn. ``roster.py`` says who is there and what each cannot do,
``venvs.py`` makes an environment for each, ``report.py`` and ``figure.py`` write what was found.
"""
