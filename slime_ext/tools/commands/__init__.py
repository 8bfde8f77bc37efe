"""The sub-commands of ``slime-ext``, imported when they are called."""
