"""Measures what importing the plugin adds to torch and PyYAML: seconds and resident memory."""

import resource
import time


def cost(title, load):
    """Prints the seconds that ``load`` takes, and the MiB that it adds to peak memory."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    load()
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(f"{title:<22} {time.perf_counter() - start:5.2f} s {grown / 1024:6.1f} MiB")


def plugin():
    from slime_ext.tis import token_tis  # noqa: F401


if __name__ == "__main__":
    cost("torch", lambda: __import__("torch"))
    cost("PyYAML", lambda: __import__("yaml"))
    cost("slime_ext.tis", plugin)
