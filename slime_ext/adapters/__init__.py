"""Runs the same corrections inside other systems, through their registries: docs/elsewhere.md."""
