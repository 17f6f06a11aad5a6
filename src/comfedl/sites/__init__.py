"""Runs over real sites: the apps that Flower runs, a trial on this machine, and what a site needs to start."""

from comfedl.engines import flower  # says at once where Flower is missing

__all__ = ["flower"]
