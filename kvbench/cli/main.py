"""The command `kvbench`: which commands there are, and how errors end.

To add a command: write `kvbench/cli/NAME.py` with one function whose signature is the command line and whose docstring
is its help, import torch and the parts of kvbench that need it inside that function, and add it to `COMMANDS`.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated

import typer

import kvbench
from kvbench.cli.describe import describe
from kvbench.cli.doctor import doctor
from kvbench.cli.efficiency import efficiency
from kvbench.cli.list import list_entries
from kvbench.cli.lm_eval import lm_eval
from kvbench.cli.plot_efficiency import plot_efficiency
from kvbench.cli.plot_training import plot_training
from kvbench.cli.run import run
from kvbench.cli.table import table
from kvbench.cli.train import train
from kvbench.core.errors import KvbenchError

COMMANDS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("run", run),
    ("table", table),
    ("efficiency", efficiency),
    ("plot-efficiency", plot_efficiency),
    ("train", train),
    ("lm-eval", lm_eval),
    ("plot-training", plot_training),
    ("list", list_entries),
    ("describe", describe),
    ("doctor", doctor),
)
"""Name -> function, in the order of `kvbench --help`."""

_PASSES_ON = frozenset({"lm-eval"})
"""Commands whose arguments, from the first on, are those of another program."""

DONE = 0
FAILED = 1
WRONG_INPUT = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 something failed, 2 the command line or a file is wrong."""
    arguments, debug = _split_debug(sys.argv[1:] if argv is None else argv)
    try:
        code = build_app()(args=arguments or ["--help"], prog_name="kvbench", standalone_mode=False)
        sys.stdout.flush()  # a closed pipe shows here, not in the interpreter's last moments
    except SystemExit as stop:  # Typer's own answer to a closed pipe
        _discard_stdout()
        return stop.code if isinstance(stop.code, int) else FAILED
    except BrokenPipeError:
        _discard_stdout()
        return FAILED
    except typer.TyperException as error:
        _report(error.format_message(), debug=debug)
        return WRONG_INPUT
    except KvbenchError as error:
        _report(str(error), debug=debug)
        return WRONG_INPUT
    except Exception as error:  # noqa: BLE001 - a bug is one sentence too, its traceback is a flag away
        _report(f"{type(error).__name__}: {error} (this is a bug; --debug shows where)", debug=debug)
        return FAILED
    return code if isinstance(code, int) else DONE


def build_app() -> typer.Typer:
    """Make the application from `COMMANDS`."""
    app = typer.Typer(
        help="KV-cache eviction policies: at this memory, how much of the dense model is left, and what does it cost?",
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="rich",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_options)
    for name, function in COMMANDS:
        if name in _PASSES_ON:
            settings = {"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False}
            app.command(name, context_settings=settings)(function)
        else:
            app.command(name)(function)
    return app


def _show_version(wanted: bool) -> None:
    if wanted:
        print(f"kvbench {kvbench.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and stop.", is_eager=True, callback=_show_version)
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; anywhere on the line.")
    ] = False,
) -> None:
    pass  # a docstring would replace the help text of the application


def _split_debug(argv: Sequence[str]) -> tuple[list[str], bool]:
    """Take `--debug` out, wherever it stands before `--`: it belongs to every command and works if parsing fails."""
    arguments = list(argv)
    end = arguments.index("--") if "--" in arguments else len(arguments)
    kept = [argument for argument in arguments[:end] if argument != "--debug"]
    return kept + arguments[end:], len(kept) < end


def _report(sentence: str, *, debug: bool) -> None:
    if debug:
        traceback.print_exc()
    print(f"error: {sentence}", file=sys.stderr)


def _discard_stdout() -> None:
    """Keep the interpreter from complaining about the closed pipe again when it flushes at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
