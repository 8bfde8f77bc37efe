"""Checks a launch in three passes, each with one plain result. ``run.py`` runs them, one after the other.

launch = read_script(path)    tools/launch/read.py: the flags, their values, and why some are unknown
case = case_of(launch)        setup.py: the host's arguments, from flags and files
case, lines = judged(case)    lines.py: the loaded configuration, and the lines of the rules
answer_of(case, lines)        answer.py: only formats what the command prints
"""
