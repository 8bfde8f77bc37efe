"""Measures what corrections cost: ours against other systems, and how the cost grows."""
