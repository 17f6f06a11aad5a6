"""The mathematics, and the contract between server and clients."""

from comfedl.core import optim, schedule

__all__ = ["optim", "schedule"]
