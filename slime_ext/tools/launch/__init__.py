"""Reads a launch script and returns one ``Launch``.

A shell script runs only in a sandbox; a Python launcher is executed only with --run.
"""
