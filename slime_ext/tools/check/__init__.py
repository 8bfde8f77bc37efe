"""Judges a launch in two passes. Another pass reads it before, and another prints the answer.

sources = named_sources(path)  tools/launch/sources.py: the flags and the keys of files, and what is unknown
case = case_of(sources)        setup.py: the host's arguments, from flags and keys
case, verdict = judged(case)   lines.py: the loaded configuration, and the lines of the rules
answer_of(case, verdict)       tools/commands/check_answer.py: only formats what the command prints
"""
