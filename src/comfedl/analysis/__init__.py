"""Runs that have ended or go on: read back, compared, reported and served."""
