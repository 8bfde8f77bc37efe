"""Dumps of slime, of the embedded launcher, and JSONL, as a stream of ``Rollout``.

One ``Job`` at a time is in memory: the files of one rollout.
"""

from slime_ext.analysis.readers.find import Found, Job, Wanted, find
from slime_ext.lazy_attributes import lazy_attributes

__all__ = ["Found", "Job", "Wanted", "find"]

# What reads needs torch; which files there are does not.
__getattr__, __dir__ = lazy_attributes(__name__, {"read": "stream"})
