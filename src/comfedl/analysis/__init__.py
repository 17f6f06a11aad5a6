"""Finished and running runs: load, predict, compare, report and watch."""
