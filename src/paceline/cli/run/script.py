"""The first thing in a rank's process: runs the script as ``python script.py`` would.

The launcher starts this file by its path, so that a rank whose script does not use paceline does
not import it. The script gets ``__main__``, ``sys.argv`` and ``sys.path[0]`` as if it had been
started directly; functions of it can be pickled, and processes it spawns find it. What is added:

- the rank ends when its launcher is gone, however that ended; a member of an elastic job goes on;
- how the script failed (when, with what, where) is written down for the launcher, which tells the
  first failure from its consequences. Only the first one's traceback is printed by the rank itself;
- ``PACELINE_DROP_IN`` calls :func:`paceline.install` first: ``1`` for all of it, ``names`` for
  torch's classes and functions alone, ``engine`` for ``init_process_group`` alone.
"""

from __future__ import annotations

import builtins
import contextlib
import errno
import importlib.machinery
import importlib.util
import io
import json
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, TracebackType
from typing import Any, NoReturn

_PR_SET_PDEATHSIG = 1

# Errors that another rank's failure causes, by the names of their classes.
_CONSEQUENCES = frozenset(
    {"CollectiveTimeoutError", "PeerDiedError", "PeerError", "PeerExhaustedError"}
    | {"PeerFailedError", "PeerLeftError", "DistBackendError", "DistNetworkError", "DistStoreError"}
)
_CAUGHT = re.compile(r"Caught \S+ in (.+)\.\nOriginal Traceback")  # torch's ExceptionWrapper
_FRAME = re.compile(r'^  File "(.+)", line (\d+)', re.MULTILINE)
_GLOO_SAYS = ("Connection closed by peer", "Connection reset by peer", "gloo/transport")


def main(arguments: list[str]) -> NoReturn:
    """Run ``[-m] target arguments…`` and end the process as the script asks for."""
    module = arguments[0] == "-m"
    target, *rest = arguments[1:] if module else arguments
    _die_with_the_launcher()
    _outlive_the_agent()
    _write_whole_lines()
    try:
        _prepare()
        sys.argv = [target, *rest]
        code = _as_module(target) if module else _as_script(target)
        exec(code, sys.modules["__main__"].__dict__)
    except SystemExit as ending:
        _report_exit(ending)
        raise
    except BaseException as error:
        _fail(error)
    sys.exit(_check_group_size())


# -- before the script ------------------------------------------------------------------------


def _die_with_the_launcher() -> None:
    launcher = os.environ.pop("PACELINE_LAUNCHER", "")
    if not launcher:
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(launcher):  # it went before we asked
        os._exit(128 + signal.SIGKILL)


def _outlive_the_agent() -> None:
    """Have what a member writes read when its agent is gone: nobody else would, and a pipe that
    is full would hold it up, one without a reader end it.
    """
    agent = os.environ.pop("PACELINE_AGENT", "")
    if not agent:
        return
    pipes = [os.open(f"/proc/self/fd/{number}", os.O_RDONLY | os.O_NONBLOCK) for number in (1, 2)]
    threading.Thread(target=_read_after, args=(int(agent), pipes), daemon=True).start()


def _read_after(agent: int, pipes: list[int]) -> None:
    with contextlib.suppress(OSError):  # it is gone already
        select.select([os.pidfd_open(agent)], [], [])
    while True:
        for pipe in select.select(pipes, [], [])[0]:
            if not os.read(pipe, 1 << 16):
                return  # this process has closed its output


def _write_whole_lines() -> None:
    """Where the output is not a launcher's of ours to put together: srun or mpirun carries it."""
    if _notes() is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)


def _prepare() -> None:
    if _notes() is not None:
        sys.excepthook = _print_if_first
        # A process that the script forks is no rank, and its end is not the rank's.
        os.register_at_fork(after_in_child=lambda: os.environ.pop("PACELINE_NOTES", None))
    if mode := os.environ.get("PACELINE_DROP_IN", ""):
        import paceline

        paceline.install(names=mode != "engine", engine=mode != "names")


def _as_script(target: str) -> CodeType:
    """Make ``__main__`` what ``python target`` makes it, and return its code."""
    if os.path.isdir(target):
        sys.path.insert(0, target)
        return _as_module("__main__", argv0=target)
    _add_to_path(os.path.dirname(os.path.realpath(target)))
    path = os.path.abspath(target)
    loader = importlib.machinery.SourceFileLoader("__main__", path)
    _become_main(__file__=path, __loader__=loader, __spec__=None, __package__=None)
    with io.open_code(path) as file:
        return compile(file.read(), path, "exec", dont_inherit=True)


def _as_module(name: str, argv0: str = "") -> CodeType:
    """Make ``__main__`` what ``python -m name`` makes it, and return its code."""
    if not argv0:
        _add_to_path(os.getcwd())
    spec = _find(name, argv0)
    code = spec.loader.get_code(spec.name) if spec and spec.loader else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        print(f"{sys.executable}: No module named {name}", file=sys.stderr)
        raise SystemExit(1)
    sys.argv[0] = argv0 or spec.origin or name
    shown = None if argv0 else spec
    _become_main(
        __file__=spec.origin, __loader__=spec.loader, __spec__=shown, __package__=spec.parent
    )
    assert isinstance(code, CodeType)
    return code


def _find(name: str, folder: str) -> importlib.machinery.ModuleSpec | None:
    if folder:
        return importlib.machinery.PathFinder.find_spec(name, [folder])
    with contextlib.suppress(ModuleNotFoundError):
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            return importlib.util.find_spec(f"{name}.__main__")
        return spec
    return None


def _add_to_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, folder)


def _become_main(**names: object) -> None:
    """Hand ``__main__`` to the script: nothing of this file stays in it."""
    own = sys.modules["__main__"].__dict__
    own.clear()
    own.update(__name__="__main__", __builtins__=builtins, __doc__=None, __cached__=None)
    own.update(names)


# -- after the script -------------------------------------------------------------------------


def _check_group_size() -> int:
    """Refuse the run whose ranks trained in smaller groups than were started."""
    dist = sys.modules.get("torch.distributed")
    asked = int(os.environ.get("WORLD_SIZE", "1"))
    if dist is None or not dist.is_available() or not dist.is_initialized():
        return 0
    found = dist.get_world_size()
    if found == asked or _has_recovered():
        return 0
    words = (
        f"{asked} ranks were started, but the script made its group of {found}: they did not "
        "train together. Let init_process_group read WORLD_SIZE and RANK from the environment."
    )
    _report("SystemExit", words, "", "", False, time.monotonic())
    if _notes() is None:
        print(f"paceline: {words}", file=sys.stderr)
    return 1


def _has_recovered() -> bool:
    """Whether this rank goes on in a smaller group, having lost others (groups/launcher.py)."""
    folder = _notes()
    return folder is not None and (folder / f"survivor-{os.environ['RANK']}.json").exists()


def _fail(error: BaseException) -> NoReturn:
    """Leave a note, print the traceback if that is due, and end this rank."""
    when = time.monotonic()  # before anything that takes long: the first to fail is the cause
    trace = _script_part(error.__traceback__)
    error.__traceback__ = trace
    text = "".join(traceback.format_exception(type(error), error, trace))
    message, place = cause_in_worker(type(error).__name__, _message(error))
    place, consequence = place or _place(trace), _is_consequence(error)
    _report(type(error).__name__, message, text, place, consequence, when)
    # As Python does before it prints: who asks at exit how the program ended finds it there.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    sys.excepthook(type(error), error, trace)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or not there
        sys.stdout.flush()
    sys.exit(128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1)


def _print_if_first(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Stand in for Python's own hook: what another rank has caused, the launcher tells."""
    if _is_consequence(error) or isinstance(error, KeyboardInterrupt) or not _is_first():
        return
    # torch's hook collects what this one prints, to put the rank before it: it has one already.
    ours = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) else sys.stderr
    print("".join(traceback.format_exception(kind, error, trace)), end="", file=ours, flush=True)


def _message(error: BaseException) -> str:
    try:
        return _about_the_port(str(error))
    except Exception:  # of an error whose own __str__ fails
        return ""


def _about_the_port(message: str) -> str:
    """Say what to do where a script has looked for a store at a port that nobody listens on."""
    port = os.environ.get("PACELINE_MASTER", "").rpartition(":")[2]
    if "PACELINE_STORE" not in os.environ or not port or f"{port})" not in message:
        return message
    hint = "(no store listens on MASTER_PORT; paceline run --master-port PORT opens one there)"
    first, newline, rest = message.partition("\n")
    return f"{hint} {first}{newline}{rest}"


def cause_in_worker(kind: str, message: str) -> tuple[str, str]:
    """What happened, and the line, where a DataLoader's worker has sent its traceback as a message.

    The first line of such a message says only that something was caught; other messages stay.

    >>> sent = "Caught KeyError in DataLoader worker process 0.\\nOriginal Traceback (most recent "
    >>> sent += 'call last):\\n  File "data.py", line 7, in __getitem__\\nKeyError: 12\\n'
    >>> cause_in_worker("KeyError", sent)
    ('12 (in DataLoader worker process 0)', 'data.py:7')
    """
    found = _CAUGHT.match(message)
    frames = _FRAME.findall(message)
    if found is None or not frames:
        return message, ""
    lines = message[message.rindex(f'File "{frames[-1][0]}", line {frames[-1][1]}') :].splitlines()
    said = [line for line in lines[1:] if line[:1].strip()] or [kind]
    first, *rest = [said[0].removeprefix(f"{kind}: "), *said[1:]]
    own = [frame for frame in frames if not _is_library(frame[0])] or frames
    path, line = own[-1]
    return "\n".join([f"{first} (in {found[1]})", *rest]), f"{os.path.basename(path)}:{line}"


def _report_exit(ending: SystemExit) -> None:
    code = ending.code
    if code is not None and (not isinstance(code, int) or code & 0xFF):  # what a shell would see
        said = code if isinstance(code, str) else ""
        place = _place(_script_part(ending.__traceback__))
        _report("SystemExit", said, "", place, False, time.monotonic())
        _is_first()


def _report(kind: str, message: str, text: str, place: str, consequence: bool, when: float) -> None:
    """Leave the launcher a note: whole, or not at all."""
    folder = _notes()
    if folder is None:
        return
    message, text = (
        # Names of files may hold bytes that are no letters; a JSON reader does not take them.
        words.encode("utf-8", "backslashreplace").decode()
        for words in (message, text)
    )
    note = {
        "rank": _number(),
        "when": when,
        "kind": kind,
        "message": message,
        "traceback": text,
        "place": place,
        "consequence": consequence,
    }
    path = folder / f"rank-{note['rank']}.json"
    try:
        _write(path, note)
    except OSError as error:  # the launcher may be gone
        if error.errno in (errno.EMFILE, errno.ENFILE):
            with contextlib.suppress(OSError):
                os.close(0)  # the script is over and reads no more: there is a descriptor for this
                _write(path, note)


def _write(path: Path, note: object) -> None:
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(note))
    draft.replace(path)


def _number() -> int:
    """This process's rank; in an elastic job, where ranks change, its number as a member."""
    return int(os.environ.get("PACELINE_MEMBER") or os.environ["RANK"])


def _is_first() -> bool:
    """Whether no rank of this host has failed before."""
    folder = _notes()
    if folder is None:
        return True
    try:
        os.close(os.open(folder / "first", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    except OSError:  # the folder is gone: better twice than not at all
        return True
    return True


def _notes() -> Path | None:
    folder = os.environ.get("PACELINE_NOTES", "")
    return Path(folder) if folder else None


def _is_consequence(error: BaseException) -> bool:
    names = {base.__name__ for base in type(error).__mro__}
    said = _message(error)
    by_word = isinstance(error, RuntimeError) and any(word in said for word in _GLOO_SAYS)
    return by_word or bool(names & _CONSEQUENCES)


def _script_part(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    return trace


def _place(trace: TracebackType | None) -> str:
    """The innermost line of the user's own code, as in ``train.py:41``."""
    frames = list(_frames(trace))
    own = [frame for frame in frames if not _is_library(frame[0])]
    if not frames:
        return ""
    path, line = (own or frames)[-1]
    return f"{os.path.basename(path)}:{line}"


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, int]]:
    while trace is not None:
        yield trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next


def _is_library(path: str) -> bool:
    homes = (os.path.dirname(os.__file__), str(Path(__file__).parents[2]))
    installed = "site-packages" in path or "dist-packages" in path
    return installed or path.startswith(("<", *(home + os.sep for home in homes)))


def _load_self() -> Any:
    """This file again, as a module of its own: ``__main__`` is about to become the script's."""
    spec = importlib.util.spec_from_file_location("paceline_run_script", __file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, which is no business of the script's
    _load_self().main(sys.argv[1:])
