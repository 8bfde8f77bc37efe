"""Collects sums over the tokens of a run, from which findings and effects of corrections follow."""
