"""What is measured, and how: run as ``python -m benchmarks.NAME`` from the repository's root."""
