"""Hand-written derivatives and batched learners."""
