"""Judges a launch in two passes, between the one that reads it and the one that prints.

sources = named_sources(path)  tools/launch/sources.py: the flags and the keys of files, and what is unknown
case = case_of(sources)        setup.py: the host's arguments, from flags and keys
case, verdict = judged(case)   lines.py: the loaded configuration, and the lines of the rules
answer_of(case, verdict)       tools/commands/check_answer.py: only formats what the command prints
"""
