"""Federated data: containers, partitions, importers and downloads."""

from comfedl.data import partition, transform
from comfedl.data.federated import FederatedData
from comfedl.data.loading import load

__all__ = ["FederatedData", "load", "partition", "transform"]
