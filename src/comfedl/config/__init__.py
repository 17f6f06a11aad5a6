"""TOML files turned into objects."""
