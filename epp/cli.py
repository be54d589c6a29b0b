"""The command line: `epp serve`, `epp check`, `epp explain`, `epp envoy-config`.

Exit status: 0 done, 1 failed while running, 2 wrong flags or configuration (one clear line on
standard error names the key or flag and the remedy).
"""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn

from epp.app import run
from epp.build import compiled
from epp.config import EndpointPickerConfig, effective_yaml, load_config, resolve
from epp.core.errors import ConfigError, EppError
from epp.envoy.command import add_command as add_envoy_config
from epp.explain_command import add_command as add_explain
from epp.flags import FLAGS, Effect, Flag, Kind, ServeOptions, parse_flags

USAGE_ERROR = 2

DESCRIPTION = """\
Endpoint Picker for Envoy: the service an Envoy gateway asks, for every LLM request, which vLLM
endpoint of the pool should serve it.

  epp serve         answer the gateway (ext_proc)
  epp check         validate a configuration file and print it with all defaults
  epp explain       say why a request goes where it goes, from what a picker knows
  epp envoy-config  print a complete Envoy bootstrap for running without a gateway product

Try it: epp serve --endpoints 127.0.0.1:8000,127.0.0.1:8001 --secure-serving=false
"""


class Parser(argparse.ArgumentParser):
    """argparse, with errors on one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the `epp` script. Returns the exit status."""
    parser = Parser(
        prog="epp",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_serve(commands)
    _add_check(commands)
    add_explain(commands)
    add_envoy_config(commands)
    args, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized argument {unknown[0]}{_did_you_mean(unknown[0])}")
    try:
        return int(args.run(args))
    except ConfigError as error:
        print(f"epp: {error}", file=sys.stderr)
        return USAGE_ERROR
    except EppError as error:
        print(f"epp: {error}", file=sys.stderr)
        return 1


def _did_you_mean(argument: str) -> str:
    name = argument.partition("=")[0].lstrip("-")
    near = difflib.get_close_matches(name, [flag.name for flag in FLAGS], n=1)
    return f"; did you mean --{near[0]}?" if near else ""


# -- epp serve -----------------------------------------------------------------------------


def _add_serve(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "serve",
        help="answer the gateway",
        description="Serve ext_proc for an Envoy gateway. Flags are those of the reference EPP; "
        "*own* marks ours. Booleans are also accepted as --flag=false. Without a configuration "
        "the default profile runs (see docs/configuration.md).",
        allow_abbrev=False,
    )
    others = parser.add_argument_group("of the reference EPP, without effect or not built here")
    for flag in FLAGS:
        _add_flag(parser if flag.effect is Effect.HONOURED else others, flag)
    parser.set_defaults(run=_serve)


def _add_flag(parser: argparse._ActionsContainer, flag: Flag) -> None:
    names = [f"--{flag.name}"] if flag.name != "v" else ["-v", "--v"]
    # Unset flags are left out of the namespace, so that "set to its default" can be told apart.
    if flag.kind is Kind.BOOL:
        parser.add_argument(
            *names,
            dest=flag.name,
            nargs="?",
            const=True,
            default=argparse.SUPPRESS,
            metavar="true|false",
            help=_help(flag),
        )
    else:
        parser.add_argument(
            *names,
            dest=flag.name,
            default=argparse.SUPPRESS,
            metavar=flag.kind.value,
            help=_help(flag),
        )


def _help(flag: Flag) -> str:
    if flag.effect is Effect.NOT_BUILT:
        return f"not built yet: {flag.help}"
    if flag.effect is Effect.NONE:
        return f"no effect: {flag.help}"
    default = "" if flag.default in (None, ()) else f" (default {_default(flag)})"
    return f"{flag.help}{default}{' *own*' if flag.ours else ''}".replace("%", "%%")


def _default(flag: Flag) -> str:
    if flag.kind is Kind.BOOL:
        return str(flag.default).lower()
    return f"{flag.default:g}s" if flag.kind is Kind.DURATION else str(flag.default)


def _serve(args: argparse.Namespace) -> int:
    values = {name: text for name, text in vars(args).items() if name != "run"}
    options = parse_flags(values)
    plan = resolve(_config_of(options))
    return run(options, plan, os.environ)


def _config_of(options: ServeOptions) -> EndpointPickerConfig | None:
    if options.config_text is not None:
        return load_config(options.config_text)
    if options.config_file is not None:
        return load_config(_read(options.config_file, "--config-file"))
    return None


def _read(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{flag} {path}: {error.strerror}", path=f"--{flag}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{flag} {path}: not UTF-8 text", path=f"--{flag}") from error


def _version() -> str:
    return f"epp {version('envoy-endpoint-picker')}{' (compiled)' if compiled() else ''}"


# -- epp check -----------------------------------------------------------------------------


def _add_check(commands: argparse._SubParsersAction[Parser]) -> None:
    parser = commands.add_parser(
        "check",
        help="validate a configuration file",
        description="Read an EndpointPickerConfig strictly and print it with all defaults filled "
        "in. Exit status 2 and the key's path when something is wrong.",
    )
    parser.add_argument("config", metavar="CONFIG", help="the file, or - for standard input")
    parser.set_defaults(run=_check)


def _check(args: argparse.Namespace) -> int:
    text = sys.stdin.read() if args.config == "-" else _read(args.config, "CONFIG")
    plan = resolve(load_config(text))
    for notice in plan.notices:
        print(f"notice: {notice}", file=sys.stderr)
    print(effective_yaml(plan), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
