"""A process that has torch imported, and of which members are forked (``template.py`` starts it).

Most of what it costs to start a member is to import torch. Whoever trains pays for that too, where
ranks are as many as cores. A fork of a process that has done so starts in a few hundredths of a
second. It is the same as a process of its own: nothing has run here but imports, Python's and
numpy's random numbers are seeded anew, and ``script.py`` runs the script as it does elsewhere.

The launcher starts this file by its path. It sends, over a socket, the variables of a member along
with three descriptors: its output, its errors, and a pipe that says that the member may go on.
A member is forked twice, and the process between ends, so that it is the launcher's child: the
launcher sees how it ends, and it does not need this process any more.
"""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import sys
import warnings
from pathlib import Path
from typing import Any

READY, GO = b"ready", b"g"
LONGEST = 1 << 16  # bytes of a message
_SCRIPT = Path(__file__).parents[1] / "script.py"


def main(arguments: list[str]) -> None:
    """Fork members that run ``arguments[1:]`` until the socket with that number is closed."""
    with socket.socket(fileno=int(arguments[0])) as door:
        script = _load(_SCRIPT, "paceline_run_script")
        _import_all()
        door.send(_why_unfit().encode() or READY)
        while True:
            message, ends, _, _ = socket.recv_fds(door, LONGEST, 3)
            if not message:
                return
            pid = _fork_away()
            if not pid:
                break
            for end in ends:
                os.close(end)
            door.send(str(pid).encode())
    _become_member(json.loads(message), *ends)
    script.main(arguments[1:])


def _import_all() -> None:
    """What every member imports, sooner or later."""
    import torch

    import paceline.data
    import paceline.elastic  # noqa: F401

    torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))])  # torch imports its compiler with it


def _why_unfit() -> str:
    """Why no member can be forked; empty if it can.

    A driver for GPUs that is in use here does not work in a fork.
    """
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the one that lists them
            continue
        if target.startswith("/dev/nvidia"):
            return f"an import has opened {target}"
    return ""


def _fork_away() -> int:
    """Fork a process of a session of its own; returns its number, and 0 in it; -1: it failed."""
    told, tells = os.pipe()
    between = _fork()
    if between:
        os.close(tells)
        os.waitpid(between, 0)  # from then on the member is the launcher's child
        with os.fdopen(told, "rb") as pipe:
            return int(pipe.read() or -1)
    try:
        if _fork():
            os._exit(0)
    except BaseException:
        os._exit(1)
    os.setsid()
    os.write(tells, str(os.getpid()).encode())
    os.close(told)
    os.close(tells)
    return 0


def _fork() -> int:
    with warnings.catch_warnings():  # threads that imports leave are those of libraries fit for it
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become_member(own: dict[str, str], out: int, errors: int, goes: int) -> None:
    """Take a member's place, once the launcher has noted it."""
    if os.read(goes, 1) != GO:
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, end in enumerate((nothing, out, errors)):
        os.dup2(end, number)
    for end in (nothing, out, errors, goes):
        os.close(end)
    os.environ.update(own)
    if "numpy" in sys.modules:
        numpy: Any = sys.modules["numpy"]
        numpy.random.seed()
    from paceline.elastic import note_fork

    note_fork()


def _load(path: Path, name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    sys.path.pop(0)  # this file's folder, which is no business of the script's
    # As a module of its own: a member's ``__main__`` is the script's.
    _load(Path(__file__), "paceline_template").main(sys.argv[1:])
