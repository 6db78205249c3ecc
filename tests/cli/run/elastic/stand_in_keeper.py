"""A keeper that asks nobody: every process that says that it is up is in the roster at once.

``python stand_in_keeper.py PATH …`` serves one agent and takes no notice of anybody else.
"""

import os
import selectors
import socket
import struct
import sys

import msgspec

sys.argv[0] = "paceline"  # by that name torch is not imported, and it starts at once
import paceline._members as agents  # noqa: E402

LENGTH = struct.Struct(">I")


class Roster:
    """Who lives; told to the agent after each change."""

    def __init__(self) -> None:
        self.next, self.number = 0, 0
        self.living: set[int] = set()
        self.gone: set[int] = set()  # what they said may be read after the agent's word
        self.well = False

    def answer(self, word: agents.AgentWord) -> list[msgspec.Struct]:
        if isinstance(word, agents.AgentHello):
            self.living = set(word.members)
            self.next = max([self.next - 1, *word.members]) + 1
            return []
        if isinstance(word, agents.Enlist):
            self.next += 1
            return [agents.Enlisted(self.next - 1)]
        if isinstance(word, agents.Alive):
            return [word]
        if isinstance(word, agents.NoMore):
            return [] if self.living else [agents.Over(f"nobody is left ({word.why})", True)]
        if isinstance(word, agents.Gone):
            self.living.discard(word.member)
            self.gone.add(word.member)
            self.well |= not word.failed
            if not self.living and self.well:
                return [agents.Over("it is finished", False)]
            return self.formed({word.member: word.how}) if self.living else []
        return []

    def formed(self, gone: dict[int, str]) -> list[msgspec.Struct]:
        self.number += 1
        seconds = 0.01 if gone else 0.0
        return [
            agents.Formed(self.number, tuple(sorted(self.living)), (), gone, seconds, self.number)
        ]


def words(data: bytearray) -> list[agents.AgentWord]:
    found = []
    while len(data) >= LENGTH.size and len(data) >= LENGTH.size + LENGTH.unpack_from(data)[0]:
        end = LENGTH.size + LENGTH.unpack_from(data)[0]
        found.append(
            msgspec.msgpack.decode(data[LENGTH.size : end], type=agents.AgentWord | agents.Alive)
        )
        del data[:end]
    return found


def serve(path: str) -> None:
    door = socket.socket(socket.AF_UNIX)
    temporary = f"{path}.new"
    door.bind(temporary)
    door.listen()
    os.replace(temporary, path)
    selector = selectors.DefaultSelector()
    selector.register(door, selectors.EVENT_READ, bytearray())
    roster, agent = Roster(), None
    while True:
        for key, _ in selector.select():
            connection = key.fileobj
            if connection is door:
                selector.register(door.accept()[0], selectors.EVENT_READ, bytearray())
                continue
            data = connection.recv(1 << 16)
            if not data:
                selector.unregister(connection)
                connection.close()
                if connection is agent:
                    return
            answers = []
            if data.startswith(b"up"):  # a member: it says its number, and hears nothing
                roster.living |= {int(data[2:])} - roster.gone
                answers = roster.formed({}) if roster.living else []
            else:
                agent = connection if data else agent
                key.data.extend(data)
                answers = [answer for word in words(key.data) for answer in roster.answer(word)]
            for answer in answers:
                text = msgspec.msgpack.encode(answer)
                agent.sendall(LENGTH.pack(len(text)) + text)


if __name__ == "__main__":
    if sys.stdin.buffer.read(1):  # else the agent is gone that would have given the word
        serve(sys.argv[1])
