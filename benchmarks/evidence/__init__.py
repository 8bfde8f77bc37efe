"""Does an off-policy correction matter, and which? Arms x seeds on the real engines, judged as said."""
