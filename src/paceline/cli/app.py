"""The commands by name, and how one of them is found, parsed and called.

A command's file is imported only when that command is asked for: ``paceline --help`` must not wait
for torch, nor ``paceline doctor`` for the demo. The others are listed with their line of help.
"""

from __future__ import annotations

import errno
import importlib
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Annotated, Any

import typer

from . import say

STDOUT = 1

# What `paceline --help` says of each; the file or folder of that name has a function of that name.
COMMANDS: Mapping[str, str] = MappingProxyType(
    {
        "run": "Run a script on several ranks, on one or more hosts.",
        "demo": "Train a small model on all cores and watch it.",
        "doctor": "Show what this machine has, which backend will be picked, and what to change.",
        "report": "Turn a recorded run into one HTML page.",
        "native": "Build an optional C++ part, for models with many small parameters.",
        "bench": "Measure paceline against torch on this machine.",
    }
)


def _torchrun_spelling(option: str) -> str:
    """An option's name as we spell it: torchrun has ``--nproc_per_node`` too."""
    ours = {"nproc-per-node": "nproc", "shutdown-timeout": "grace"}
    name = option.replace("_", "-")
    return ours.get(name, name)


# Options of `run` end where the script begins: what follows is the script's.
SETTINGS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {"run": {"allow_interspersed_args": False, "token_normalize_func": _torchrun_spelling}}
)


def answer(arguments: Sequence[str] | None = None) -> int:
    """Run the command that ``arguments`` ask for and return its exit code.

    What is wrong with the arguments is said in one line; an error of ours keeps its traceback.
    """
    words = list(sys.argv[1:] if arguments is None else arguments)
    chosen = next((word for word in words if not word.startswith("-")), "")
    try:
        code = app_with(chosen)(words, prog_name="paceline", standalone_mode=False)
    except KeyboardInterrupt:
        return _say_stopped()
    except Exception as error:
        return _say_what_is_wrong(error)
    return code if isinstance(code, int) else 0


def _say_stopped() -> int:
    say.complain("stopped")
    return 128 + signal.SIGINT


def _say_what_is_wrong(error: Exception) -> int:
    """Tell a misuse in one line; typer has carried its own copy of click since 0.20."""
    if type(error).__name__ == "Abort":
        return _say_stopped()
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _say_full(error)
    if not hasattr(error, "format_message"):
        raise error
    if not error.format_message():  # nothing was asked, and the help has been shown
        return int(getattr(error, "exit_code", 2))
    context = getattr(error, "ctx", None)
    hint = f" See {context.command_path} --help." if context else ""
    text = error.format_message().rstrip(".")
    say.complain(f"{text}{'' if text.endswith('?') else '.'}{hint}")
    return int(getattr(error, "exit_code", 2))


def _say_full(error: OSError) -> int:
    say.complain(f"{error.filename or 'its output'} could not be written: {error.strerror}.")
    os.dup2(os.open(os.devnull, os.O_WRONLY), STDOUT)  # or the last flush fails again
    return 1


def app_with(chosen: str) -> typer.Typer:
    """The command line with ``chosen`` loaded and the other commands listed by name."""
    app = typer.Typer(
        name="paceline",
        help="Data-parallel training for PyTorch.",
        epilog="Start with: paceline doctor, then paceline demo. Add --help to any command.",
        context_settings={"help_option_names": ["-h", "--help"]},
        pretty_exceptions_enable=False,
        add_completion=False,
        no_args_is_help=True,
    )
    app.callback()(_options)
    for name, line in COMMANDS.items():
        command = _load(name) if name == chosen else _listed
        about = _paragraphs(command.__doc__ or line) if name == chosen else line
        app.command(name, context_settings=SETTINGS.get(name), help=about, short_help=line)(command)
    return app


def _load(name: str) -> Callable[..., Any]:
    command: Callable[..., Any] = getattr(importlib.import_module(f".{name}", __package__), name)
    return command


def _paragraphs(text: str) -> str:
    """A docstring for the terminal to wrap: ours are wrapped for an editor."""
    return "\n\n".join(" ".join(part.split()) for part in text.split("\n\n"))


def _listed() -> None:
    """Stand in for a command that was not asked for."""


def _show_version(asked: bool) -> None:
    if asked:
        print(f"paceline {_version()}")
        raise typer.Exit


def _version() -> str:
    from paceline import __version__

    return __version__


def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Take the options that belong to no command."""
