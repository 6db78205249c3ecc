"""The key of a job on several hosts, and the certificates that it makes.

A job has a certificate authority of its own. Its private key lies in the **key file**, which every
host has a copy of, readable by its owner alone. With it each agent makes a certificate for itself,
in memory; that is never written down, and the file is not needed again. No environment variable, no
argument and no log holds any of it: an argument names the file.

The cryptography is OpenSSL's, through the ``cryptography`` package and Python's ``ssl``.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import KeyFileError, LaunchError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

AGENT = "agent.paceline"  # the name in the certificate of every agent
_LIFE = timedelta(days=365)
_SKEW = timedelta(days=1)  # that another host's clock may be behind
_LARGEST = 64 * 1024  # bytes of a key file


@dataclass(frozen=True)
class Identity:
    """What a process shows to be part of a job: its certificate with its key, and the authority."""

    authority: bytes = field(repr=False)
    certificate: bytes = field(repr=False)
    key: bytes = field(repr=False)

    def answering(self) -> ssl.SSLContext:
        """Settings of the side that is called."""
        context = self._context(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # a session is not taken up again: nothing can be replayed
        return context

    def calling(self) -> ssl.SSLContext:
        """Settings of the side that calls."""
        context = self._context(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = True  # the name in the certificate, which is no host's
        return context

    def _context(self, protocol: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        context.load_verify_locations(cadata=self.authority.decode())
        _load(context, self.certificate + self.key)
        return context


def _load(context: ssl.SSLContext, chain: bytes) -> None:
    """Give ``context`` its certificate; Python takes a path only, so it gets one to memory."""
    memory = os.memfd_create("certificate", os.MFD_CLOEXEC)
    try:
        os.write(memory, chain)
        context.load_cert_chain(f"/proc/self/fd/{memory}")
    finally:
        os.close(memory)


@dataclass(frozen=True)
class JobKey:
    """The authority of one job, with the key that signs its certificates."""

    authority: bytes = field(repr=False)
    key: bytes = field(repr=False)

    @classmethod
    def make(cls, life: timedelta = _LIFE) -> JobKey:
        """A new authority, that signs for ``life``."""
        require_cryptography()
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(timezone.utc)
        name = _named(f"paceline {os.urandom(4).hex()}")
        made = _builder(name, name, key, now - _SKEW, now + life)
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        made = made.add_extension(_usage(signs_certificates=True), critical=True)
        return cls(_pem(_signed(made, key)), _private_pem(key))

    @classmethod
    def read(cls, path: str | Path) -> JobKey:
        """The key that lies at ``path``, if nobody but its owner can have read it."""
        require_cryptography()
        text = _read_private(Path(path))
        begin = text.find(b"-----BEGIN CERTIFICATE-----")
        found = cls(text[begin:], text[:begin]) if begin > 0 else cls(b"", b"")
        found._check(path)
        return found

    def write(self, path: str | Path) -> None:
        """Make a file of it that only this user can read; there must be none yet."""
        try:
            number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise KeyFileError(
                f"cannot make the key file {path} ({error.strerror})",
                "Give a path where there is no file yet, in a folder that is yours.",
                str(path),
            ) from None
        with os.fdopen(number, "wb") as file:
            file.write(self.key + self.authority)

    def identity(self, name: str, life: timedelta | None = None) -> Identity:
        """A new certificate with a key of its own, for a process called ``name``."""
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric import ec

        authority, signer = self._certificate(), self._private_key()
        key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.now(timezone.utc)
        until = authority.not_valid_after_utc if life is None else now + life
        since = min(now, until) - _SKEW
        made = _builder(_named(name), authority.subject, key, since, until)
        made = made.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        made = made.add_extension(_usage(signs_certificates=False), critical=True)
        made = made.add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        made = made.add_extension(_follows(authority), critical=False)
        return Identity(self.authority, _pem(_signed(made, signer)), _private_pem(key))

    def _check(self, path: str | Path) -> None:
        """Refuse a file that is no key, and one whose time is over."""
        try:
            until = self._certificate().not_valid_after_utc
            self._private_key()
        except ValueError:
            raise KeyFileError(
                f"{path} is not a complete key file of paceline",
                "Make one with paceline run --new-key FILE, and copy it to every host.",
                str(path),
            ) from None
        if until < datetime.now(timezone.utc):
            raise KeyFileError(
                f"the key in {path} was good until {until:%Y-%m-%d}",
                "Make a new one with paceline run --new-key FILE, and copy it to every host.",
                str(path),
            )

    def _certificate(self) -> x509.Certificate:
        from cryptography import x509

        return x509.load_pem_x509_certificate(self.authority)

    def _private_key(self) -> EllipticCurvePrivateKey:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import load_pem_private_key

        found = load_pem_private_key(self.key, None)
        if not isinstance(found, ec.EllipticCurvePrivateKey):
            raise ValueError("another kind of key")
        return found


def require_cryptography() -> None:
    """Say what to install where no certificate can be made."""
    try:
        import cryptography  # noqa: F401
    except ImportError:
        raise LaunchError(
            "several hosts need certificates, and the package that creates them is not "
            "installed here",
            "Install it on every host: pip install 'paceline[hosts]'.",
        ) from None


def _read_private(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            seen = os.fstat(file.fileno())
            text = file.read(_LARGEST) if stat.S_ISREG(seen.st_mode) else b""
    except OSError as error:
        raise KeyFileError(
            f"cannot read the key file {path} ({error.strerror})",
            "Make one with paceline run --new-key FILE, and copy it to every host.",
            str(path),
        ) from None
    if seen.st_mode & 0o077 or seen.st_uid not in (os.geteuid(), 0):
        raise KeyFileError(
            f"other users may have read the key file {path} (mode "
            f"{stat.S_IMODE(seen.st_mode):o}, owner {seen.st_uid})",
            f"Create a new one. If only you can have read it: chmod 600 {path}.",
            str(path),
        )
    return text


# -- certificates -----------------------------------------------------------------------------


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: EllipticCurvePrivateKey,
    since: datetime,
    until: datetime,
) -> x509.CertificateBuilder:
    from cryptography import x509

    public = key.public_key()
    made = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(public)
    made = made.serial_number(x509.random_serial_number())
    made = made.not_valid_before(since).not_valid_after(until)
    return made.add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)


def _named(name: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _follows(authority: x509.Certificate) -> x509.AuthorityKeyIdentifier:
    """Name the key that signed it: OpenSSL requires that in its strict mode."""
    from cryptography import x509

    known = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(known)


def _signed(made: x509.CertificateBuilder, key: EllipticCurvePrivateKey) -> x509.Certificate:
    from cryptography.hazmat.primitives import hashes

    return made.sign(key, hashes.SHA256())


def _pem(certificate: x509.Certificate) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding

    return certificate.public_bytes(Encoding.PEM)


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import (
        Encoding,
        NoEncryption,
        PrivateFormat,
    )

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
