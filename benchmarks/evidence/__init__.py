"""Measures whether an off-policy correction matters, and which: arms x seeds on the real engines."""
