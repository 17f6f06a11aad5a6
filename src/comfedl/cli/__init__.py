"""The command line: one file per group of commands, registered in ``main``.

Commands import heavy modules such as torch only when they run, so that ``--help`` stays fast.
"""
