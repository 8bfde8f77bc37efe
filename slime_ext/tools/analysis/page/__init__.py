"""The page: one HTML file without scripts or network, drawn from a document and nothing else."""
