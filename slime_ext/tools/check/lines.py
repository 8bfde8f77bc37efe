"""Runs the third pass of ``check``: loads the configuration of a launch, and judges it by the rules."""

from __future__ import annotations

from dataclasses import replace

from slime_ext.errors import ConfigError, cut
from slime_ext.hosts.flags import ARGUMENTS
from slime_ext.rules.configuration import loaded_from
from slime_ext.rules.judge import OF_INIT_ALONE, RULES, Verdict, broken, verdict
from slime_ext.rules.rule import HOST, REFUSE, WARN, BrokenRuleError, Line
from slime_ext.rules.setup import Setup
from slime_ext.tools.check.setup import Case, Use, without_file
from slime_ext.tools.convert import CONVERTED
from slime_ext.tools.folders import find_own_steps


def judged(case: Case) -> tuple[Case, Verdict]:
    """Judges a launch, or the flags that would add slime_ext to it.

    Returns:
        The case with its configuration, and with the offers that no rule refuses; and the lines of the rules.

    Raises:
        ConfigError: the configuration does not load, the launch breaks a rule that refuses or a rule of the
            host, or a YAML file holds nothing for slime_ext.
    """
    if case.use is Use.KNOWN:
        find_own_steps(getattr(case.setup.args, "slime_ext", None))
        setup = loaded_from(case.setup)
        lines = verdict(setup)
        lines.require((REFUSE, HOST))
        if not case.sources.launch.script:  # the launch is unknown, so rules over its flags only print
            lines = Verdict(verdict(replace(setup, unknown=())).broken)
        return replace(case, setup=setup), lines
    if case.use is not Use.NONE:
        return case, Verdict()
    if not case.sources.launch.script:
        _forbid_bare_block(case.setup, case.sources.file)
    offers, refused = dict[str, Setup | ConfigError](), dict[str, Line]()
    for when, offer in case.offers.items():
        try:
            if isinstance(offer, ConfigError):
                raise offer
            offers[when] = setup = loaded_from(offer)
            lines = verdict(setup)
            lines.require((REFUSE, HOST))
            lines.require((WARN,), OF_INIT_ALONE)
        except ConfigError as error:
            # A note without a rule, because the launch itself breaks none.
            offers.pop(when, None)
            refused.setdefault(str(error), Line(str(error)))
    misspelt = broken(without_file(case.setup), (WARN,), [RULES["misspelt_host_flag"]])
    return replace(case, offers=offers), Verdict((*refused.values(), *misspelt))


def line_of(error: Exception) -> Line:
    """Returns an error as a line, with the rule that raised it."""
    return Line(str(error), error.rule if isinstance(error, BrokenRuleError) else None)


def _forbid_bare_block(setup: Setup, file: str) -> None:
    """Raises ConfigError for a file that holds nothing for slime_ext: what it holds, and what to do."""
    foreign = vars(setup.args).keys() - ARGUMENTS.keys()
    shared = {name: [key for key in each.defaults if key in foreign] for name, each in CONVERTED.items()}
    system = max(shared, key=lambda name: len(shared[name]))
    if keys := shared[system]:
        raise ConfigError(
            f"{file}: expected the key slime_ext, got keys of {system} ({', '.join(map(cut, keys[:3]))}), "
            "which slime_ext does not read there: keep them for a hook that does, or run slime-ext convert "
            f"--from {system} {file} to translate them"
        )
    raise ConfigError(
        f"{file}: expected the key slime_ext, got none: run slime-ext presets NAME to print one"
    )
