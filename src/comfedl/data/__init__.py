"""Data: federated data sets, partitioners and the sources of real data."""

from comfedl.data import partition
from comfedl.data.federated import FederatedData
from comfedl.data.loading import load

__all__ = ["FederatedData", "load", "partition"]
