"""`longstride completion SHELL`: a script by which a shell completes verbs, options and files. shtab writes it.

It is written once, from the parsers of all verbs, so that a TAB starts no Python.
"""

from __future__ import annotations

import argparse
from typing import Any

from longstride.launcher.output import AgreedError
from longstride.launcher.verbs import VERBS, declare_options

_FILES = ("DIR", "FILE", "PATH", "RUN", "CONFIG", "PNG", ".json", ".png")  # in metavars whose words name files


def run(arguments: argparse.Namespace) -> int:
    """Prints the script; returns the exit code.

    Raises:
        AgreedError: shtab is not installed.
    """
    try:
        import shtab
    except ImportError as error:
        raise AgreedError(f'completion: needs shtab ({error}); pip install "longstride[completion]"') from None
    root = argparse.ArgumentParser(prog="longstride")
    below: dict[tuple[str, ...], Any] = {(): root.add_subparsers()}
    for verb in VERBS:
        *above, last = verb.words.split()
        group = tuple(above)
        if group not in below:  # shtab completes parsers that have a help
            below[group] = below[()].add_parser(*above, help=f"{group[0]} VERB").add_subparsers()
        parser = below[group].add_parser(last, help=verb.summary)
        declare_options(verb, parser)
        for action in parser._actions:
            if action.choices is None and any(name in str(action.metavar) for name in _FILES):
                vars(action)["complete"] = shtab.FILE  # by which shtab is told
    print(shtab.complete(root, arguments.shell))
    return 0
