"""Hyper-parameter search with Optuna: ``comfedl tune``.

Only ``study.py`` imports Optuna, and only once a search begins.
"""
