"""Asks real engines what they record as a token's log-prob under each sampling setting."""
