"""The same corrections inside other systems, through their own registries: docs/elsewhere.md."""
