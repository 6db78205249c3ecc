"""Every message of this folder, looked at by msgspec before a thread can read one.

msgspec looks at a class when it is first to be read, and two threads that have it do so at once
crash the process. So it does so here, in the thread that imports.
"""

from __future__ import annotations

from types import ModuleType

import msgspec

from . import agents, council, journal, keys, roster, service, terms, words


def _kinds(module: ModuleType) -> list[type[msgspec.Struct]]:
    found = vars(module).values()
    return [kind for kind in found if isinstance(kind, type) and issubclass(kind, msgspec.Struct)]


READ = [
    msgspec.msgpack.Decoder(kind)
    for module in (agents, council, journal, keys, roster, service, terms, words)
    for kind in _kinds(module)
]
