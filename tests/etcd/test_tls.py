"""An etcd that speaks TLS and wants to see a certificate."""

import ipaddress
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from paceline._etcd import Etcd, parse_store
from paceline.errors import StoreLostError
from tests.etcd.server import etcd_server, no_etcd

pytest.importorskip("cryptography")
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

pytestmark = pytest.mark.skipif(bool(no_etcd()), reason=no_etcd())
PEM = serialization.Encoding.PEM


def certificate(folder: Path, name: str, signer=None):
    """A certificate and its key as files, signed by another or by itself; gives what signs."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    issuer, signing = signer or (subject, key)
    now = datetime.now(timezone.utc)
    uses = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.BasicConstraints(ca=signer is None, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .sign(signing, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(made.public_bytes(PEM))
    private = key.private_bytes(
        PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / f"{name}.key").write_bytes(private)
    return subject, key


def test_an_etcd_with_tls_is_reached_with_a_certificate_and_not_without(tmp_path) -> None:
    authority = certificate(tmp_path, "ca")
    certificate(tmp_path, "server", authority)
    certificate(tmp_path, "host", authority)
    ca = f"ca={tmp_path}/ca.pem"
    options = [
        f"--cert-file={tmp_path}/server.pem", f"--key-file={tmp_path}/server.key",
        f"--trusted-ca-file={tmp_path}/ca.pem", "--client-cert-auth",
    ]  # fmt: skip
    with etcd_server(tmp_path, options=options) as where:
        mine = f"cert={tmp_path}/host.pem&key={tmp_path}/host.key"
        assert Etcd(parse_store(f"etcds://{where}?{ca}&{mine}")).grant(60)
        for stranger in (f"etcds://{where}?{ca}", f"etcds://{where}", f"etcd://{where}"):
            with pytest.raises(StoreLostError):
                Etcd(parse_store(stranger)).grant(60)
