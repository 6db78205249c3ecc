"""A service on a Unix socket, for tests: it counts who comes, and says back what it hears."""

import contextlib
import socket
import threading
from pathlib import Path

from paceline._doors import bind_private


class Echo:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.heard = bytearray()
        self.came = 0
        self._one_came = threading.Condition()
        self._door = bind_private(path)
        self._talks: list[socket.socket] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                talk = self._door.accept()[0]
            except OSError:
                return
            with self._one_came:
                self.came += 1
                self._one_came.notify_all()
            self._talks.append(talk)
            threading.Thread(target=self._answer, args=(talk,), daemon=True).start()

    def waits_for(self, count: int) -> bool:
        """Whether so many come, or have come; a porter welcomes callers before they are here."""
        with self._one_came:
            return self._one_came.wait_for(lambda: self.came >= count, 60)

    def _answer(self, talk: socket.socket) -> None:
        try:
            while said := talk.recv(65536):
                self.heard += said
                talk.sendall(said)
        except OSError:
            pass
        finally:
            talk.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            self._door.shutdown(socket.SHUT_RDWR)
        self._door.close()
        for talk in self._talks:
            talk.close()
