"""Hyper-parameter search on Optuna: ``comfedl tune``.

Optuna is imported by ``study.py`` alone, and that when a search begins.
"""
