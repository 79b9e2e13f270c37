"""`kvbench lm-eval`: lm-eval's own command line, with kvbench among its models."""

from __future__ import annotations

import sys

import typer

from kvbench.core.errors import KvbenchError


def lm_eval(context: typer.Context) -> None:
    """Run lm-eval with any policy: everything after the name is lm-eval's own; 'kvbench lm-eval run --help' shows it.

    Example: kvbench lm-eval run --model kvbench --model_args pretrained=smollm2,policy=tova,cr=0.75 --tasks arc_easy
    """
    try:
        from lm_eval.__main__ import cli_evaluate
    except ImportError as error:
        raise KvbenchError("lm-eval is not installed; run: pip install 'kvbench[lm-eval]'") from error
    import kvbench.harness.lm_eval_model  # noqa: F401 - registers the model

    before = sys.argv
    sys.argv = ["lm-eval", *context.args]
    try:
        cli_evaluate()
    except SystemExit as stop:
        raise typer.Exit(stop.code if isinstance(stop.code, int) else 0) from stop
    except (ValueError, KeyError, FileNotFoundError) as error:
        raise KvbenchError(f"lm-eval cannot run this: {' '.join(str(error).split())}") from error
    finally:
        sys.argv = before
