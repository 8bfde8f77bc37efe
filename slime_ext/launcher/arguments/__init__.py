"""The command line of the launcher, in slime's and Megatron's spelling. Imports no torch."""

from slime_ext.launcher.arguments.resolve import parse_args

__all__ = ["parse_args"]
