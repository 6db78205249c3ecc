"""Where an etcd is: ``etcd://HOST:PORT[,HOST:PORT]``, or ``etcds://`` with TLS. Pure.

With TLS, ``?ca=FILE&cert=FILE&key=FILE`` names the authority that signed the servers' certificates
and what this process shows them; each may be left out.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlsplit

from ..errors import StoreUrlError

PORT = 2379  # etcd's own
_FILES = ("ca", "cert", "key")


@dataclass(frozen=True)
class StoreAddress:
    """The servers of one etcd, and how they are spoken to."""

    servers: tuple[tuple[str, int], ...]
    tls: bool = False
    ca: str = ""  # files; empty: what the system trusts, and nothing is shown
    cert: str = ""
    key: str = ""

    def context(self) -> ssl.SSLContext | None:
        """Settings for TLS; None where everything is in the clear."""
        if not self.tls:
            return None
        try:
            made = ssl.create_default_context(cafile=self.ca or None)
            made.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.cert:
                made.load_cert_chain(self.cert, self.key or None)
        except (OSError, ssl.SSLError) as error:
            named = ", ".join(file for file in (self.ca, self.cert, self.key) if file)
            raise StoreUrlError(
                f"the files of --store cannot be used ({error})", f"Look at {named}."
            ) from None
        return made

    def __str__(self) -> str:
        return ", ".join(f"{_bracketed(host)}:{port}" for host, port in self.servers)


def parse_store(url: str) -> StoreAddress:
    """Read what ``--store`` was given.

    >>> parse_store("etcd://10.0.0.1:2379,10.0.0.2").servers
    (('10.0.0.1', 2379), ('10.0.0.2', 2379))
    """
    scheme, _, rest = url.partition("://")
    if scheme not in ("etcd", "etcds") or not rest:
        raise _refused(url, "it must begin with etcd:// or etcds://")
    places, _, query = rest.partition("?")
    files = dict(parse_qsl(query, keep_blank_values=True))
    if unknown := sorted(files.keys() - set(_FILES)):
        raise _refused(url, f"{', '.join(unknown)} is not an option of it")
    if files and scheme == "etcd":
        raise _refused(url, "certificates belong to etcds://")
    if "key" in files and "cert" not in files:
        raise _refused(url, "it has a key and no cert")
    servers = tuple(_server(url, place) for place in places.rstrip("/").split(","))
    return StoreAddress(servers, scheme == "etcds", **files)


def _server(url: str, place: str) -> tuple[str, int]:
    try:
        found = urlsplit(f"//{place}")
        host, port = found.hostname, found.port
    except ValueError:
        host, port = None, None
    if not host or "@" in place or "/" in place:
        raise _refused(url, f"{place!r} is no HOST:PORT")
    return host, PORT if port is None else port


def _refused(url: str, why: str) -> StoreUrlError:
    return StoreUrlError(
        f"--store is {url}, and {why}", "Give etcd://HOST:PORT, with more after commas."
    )


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
