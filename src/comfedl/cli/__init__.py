"""The command line: one file a group of commands, ``main`` puts them together.

Heavy imports wait until a command needs them, so that help answers at once.
"""
