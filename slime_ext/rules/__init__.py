"""Judges a launch: errors, warnings and hints, one file per subject (``of_files``, ``of_losses``, ...).

A rule is a function under ``@rule`` in the file of its subject, which also has the rule's message and what
only this rule needs to know. ``judge`` imports the files, and so finds every rule.
"""
