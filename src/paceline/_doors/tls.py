"""One port, and TLS 1.3 behind it: both sides show a certificate of the job, or nothing is said.

In TLS 1.3 the side that calls believes to be connected before the other has seen its certificate.
So who is called says one byte once it has, and :func:`connect` returns only then. Who is hung up on
before it could show its certificate calls again: there may have been a crowd.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import time

from ..errors import StrangerError
from .certificates import AGENT, Identity

WELCOME = b"\x06"
BACKLOG = 512
PAUSE = 0.02  # seconds before it is tried again
HEARINGS = 5  # a host that hangs up on so many certificates of this one has refused it
HUNG_UP = (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)
_KEEPALIVE = (
    (socket.TCP_KEEPIDLE, 10),  # seconds without a word, until it is asked whether it is there
    (socket.TCP_KEEPINTVL, 5),
    (socket.TCP_KEEPCNT, 3),
    (socket.TCP_USER_TIMEOUT, 20_000),  # milliseconds that what was sent may stay unanswered
)


def listen(address: str, port: int) -> socket.socket:
    """A socket that listens on ``address`` and no other; port 0 takes one that is free."""
    family, kind, proto, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    listener = socket.socket(family, kind, proto)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


def connect(
    address: tuple[str, int],
    identity: Identity,
    service: str,
    timeout: float,
    name: str = AGENT,
) -> ssl.SSLSocket:
    """A connection to ``service`` of the agent that listens at ``address``; for blocking use.

    Raises StrangerError when it is none of this job, another OSError when nobody answers. The
    whole of it takes ``timeout`` seconds at most.
    """
    until = time.monotonic() + timeout
    context = calling(identity, service)
    hearings = 0
    while True:
        plain = socket.create_connection(address, _left(until))
        try:
            talk = _shake_hands(plain, context, name, until)
            hearings += 1
            _await_welcome(talk, until)
            return talk
        except HUNG_UP as error:  # for the crowd at its door, maybe
            if hearings == HEARINGS or time.monotonic() + PAUSE > until:
                raise explain(error, _shown(address)) from None
            time.sleep(PAUSE)
        except (OSError, ValueError) as error:
            raise explain(error, _shown(address)) from None


def _await_welcome(talk: ssl.SSLSocket, until: float) -> None:
    """Until the other side has looked at the certificate of this one; it may hang up before."""
    try:
        talk.settimeout(_left(until))
        if talk.recv(1) != WELCOME:
            raise ConnectionResetError("it hung up")
        talk.settimeout(None)
    except BaseException:
        talk.close()
        raise


def _shake_hands(
    plain: socket.socket, context: ssl.SSLContext, name: str, until: float
) -> ssl.SSLSocket:
    try:
        stay_in_touch(plain)
        plain.settimeout(_left(until))
        return context.wrap_socket(plain, server_hostname=name)
    except BaseException:
        plain.close()
        raise


def calling(identity: Identity, service: str) -> ssl.SSLContext:
    """Settings of who calls for ``service``."""
    context = identity.calling()
    context.set_alpn_protocols([service])
    return context


def explain(error: Exception, where: str) -> OSError:
    """Turn a failed connection into an error that says which side refused it."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return StrangerError(where, f"its certificate is not valid ({error.verify_message})")
    if isinstance(error, HUNG_UP):
        return StrangerError(where, "it rejected the certificate of this host")
    if isinstance(error, ssl.SSLError):
        return StrangerError(where, _refusal(error))
    if isinstance(error, TimeoutError):
        return StrangerError(where, "it has not shown a certificate in time")
    return error if isinstance(error, OSError) else OSError(str(error))


def _refusal(error: ssl.SSLError) -> str:
    reason = error.reason or "unknown"
    if "ALERT" in reason:
        return f"it refuses the certificate of this host ({reason})"
    return f"it does not speak TLS 1.3 ({reason})"


def stay_in_touch(connection: socket.socket) -> None:
    """Notice within half a minute that the other host is gone; send small messages at once."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (*_KEEPALIVE, (socket.TCP_NODELAY, 1)):
        with contextlib.suppress(OSError):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _left(until: float) -> float:
    return max(0.001, until - time.monotonic())


def _shown(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"
