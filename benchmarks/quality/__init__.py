"""What each method does for the worst client: the field's benchmarks, tuned alike and judged on test data."""
