"""Checks a launch in three passes, each with one plain result.

launch = read_script(path)         tools/launch/read.py: words, files and what is unknown, without our rules
setup = setup_of(launch)           setup.py: the host's arguments, and the correction that they name
lines = broken(setup, severities)  rules/judge.py: a line for each rule that the setup breaks

``answer.py`` calls the three passes and turns the lines into what the command prints.
"""
