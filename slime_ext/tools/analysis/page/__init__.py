"""Draws the page: one HTML file without scripts or network, from a document and nothing else."""
