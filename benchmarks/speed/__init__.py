"""What corrections cost: ours against other systems, and how cost grows."""
