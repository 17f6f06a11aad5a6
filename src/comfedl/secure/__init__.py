"""Secure aggregation: sites mask what they send so that the server learns sums alone.

Bonawitz et al.: Practical Secure Aggregation for Privacy-Preserving Machine Learning, CCS 2017. This package holds the
protocol: it knows nothing of models, methods or networks. docs/secure-aggregation.md has the messages and the threats.
"""
