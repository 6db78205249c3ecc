"""What ranks tell each other is read by many threads, also for the first time."""

import subprocess
import sys

# msgspec looks at a class (in Python, and so with other threads in between) when it is first to be
# read. Two threads that have it do so at once crash the process, about once in twenty times.
LOOK = """
import sys
import msgspec
import paceline, paceline.testing

def kinds(kind):
    for inner in kind.__subclasses__():
        yield inner
        yield from kinds(inner)

def calls(kind):
    found = []
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_filename))
    msgspec.msgpack.Decoder(kind)
    sys.setprofile(None)
    return [name for name in found if "msgspec" in name]

class Fresh(msgspec.Struct):
    number: int

assert calls(Fresh) and not calls(Fresh), "or this test sees nothing"
ours = [kind for kind in kinds(msgspec.Struct) if kind.__module__.startswith("paceline.")]
assert len(ours) > 12, ours
print(*sorted(kind.__qualname__ for kind in ours if calls(kind)))
"""


def test_msgspec_has_looked_at_every_message_before_a_thread_can_read_one() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LOOK], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
