"""An authority, and the certificate of a server on this machine's loopback."""

from __future__ import annotations

import dataclasses
import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclasses.dataclass(frozen=True)
class Certificates:
    """Files in PEM form."""

    authority: Path
    certificate: Path
    key: Path


def write_certificates(folder: Path) -> Certificates:
    """Return new certificates, valid for a day."""
    root, own = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    files = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
    authority = _named("authority", root, "authority", root, authority=True)
    server = _named("loopback", own, "authority", root, authority=False)
    encoding = serialization.Encoding.PEM
    files.authority.write_bytes(authority.public_bytes(encoding))
    files.certificate.write_bytes(server.public_bytes(encoding))
    form, secret = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    files.key.write_bytes(own.private_bytes(encoding, form, secret))
    return files


def write_key(path: Path) -> Path:
    """Write a key as a SuperNode takes it; return the file of its public half."""
    key = ec.generate_private_key(ec.SECP384R1())
    openssh = serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    path.write_bytes(key.private_bytes(serialization.Encoding.PEM, *openssh))
    public = path.with_suffix(".pub")
    form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    public.write_bytes(key.public_key().public_bytes(*form))
    return public


def _named(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    issuer: str,
    signer: ec.EllipticCurvePrivateKey,
    *,
    authority: bool,
) -> x509.Certificate:
    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    now = datetime.datetime.now(datetime.UTC)
    here = [x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")]
    made = (
        x509.CertificateBuilder()
        .subject_name(name(subject))
        .issuer_name(name(issuer))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName(here), critical=False)
    )
    return made.sign(signer, hashes.SHA256())
