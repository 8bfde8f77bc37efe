"""Holds the commands of ``slime-ext``, each imported when it is called."""
