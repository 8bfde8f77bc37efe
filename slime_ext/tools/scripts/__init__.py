"""What a launch script says: shell, Python and Hydra, read without running them, as one ``Launch``."""
