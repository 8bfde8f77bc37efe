"""What corrections cost: ours by backend against other systems, and how cost grows."""
