"""The page: one HTML file without scripts or network, drawn from a document and nothing else."""

from slime_ext.tools.analysis.page.page import render, write_report

__all__ = ["render", "write_report"]
