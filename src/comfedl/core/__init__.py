"""The mathematics, and the contract between server and clients."""

from comfedl.core import offset, optim, schedule

__all__ = ["offset", "optim", "schedule"]
