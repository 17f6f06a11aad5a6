"""Configs: read a TOML file, check it, and build data, model and algorithm from it."""
