"""A certificate authority, a server's certificate and the sites' keys: enough for a trial, and an example for more."""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from comfedl.utils.errors import ConfigError, RunFolderError

DAYS = 365
HOSTS = ("localhost", "127.0.0.1", "::1")


def make_certs(folder: Path, sites: Sequence[str], hosts: Sequence[str] = ()) -> list[Path]:
    """Write ca.crt, ca.key, server.pem, server.key, and for every site NAME.key and NAME.pub; nothing is replaced.

    ``hosts`` are the names and addresses by which sites reach the server, besides this machine's own.
    """
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", site) or site in ("ca", "server"):
            raise ConfigError(
                f"A site's name is {site!r}, but it is used as a file's: letters, digits, - and _ alone, and not ca or "
                "server."
            )
    if not sites or len({*sites}) < len(sites):
        raise ConfigError(f"The sites are {', '.join(sites) or 'none'}; give at least one, and each once.")
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("comfedl trial CA")
    ca = _builder(issuer, issuer, authority).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_usage(signs=True), critical=True)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
    own = _builder(_name("comfedl trial server"), issuer, server)
    own = own.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    own = own.add_extension(x509.SubjectAlternativeName([_host(host) for host in (*HOSTS, *hosts)]), critical=False)
    own = own.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    own = own.add_extension(signed_by, critical=False)
    files = {
        "ca.crt": ca.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "ca.key": _private(authority),
        "server.pem": own.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "server.key": _private(server),
    }
    for site in sites:
        key = ec.generate_private_key(ec.SECP384R1())  # a curve that Flower takes
        files[f"{site}.key"] = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
        form = serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        files[f"{site}.pub"] = key.public_key().public_bytes(*form) + f" {site}\n".encode()
    return _write(folder, files)


def _write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise RunFolderError(f"{folder} already holds {there[0]}; give another folder, or take the old keys away.")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            # A private key is for its owner alone, from its first byte on.
            handle = os.open(
                folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if name.endswith("key") else 0o644
            )
            written.append(folder / name)
            with open(handle, "wb") as file:
                file.write(content)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        raise RunFolderError(f"{folder} cannot be written ({error.strerror}); give another folder.") from error
    return written


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
    builder = builder.serial_number(x509.random_serial_number())
    start, end = now - datetime.timedelta(minutes=5), now + datetime.timedelta(days=DAYS)
    return builder.not_valid_before(start).not_valid_after(end)


def _usage(signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs,
        crl_sign=signs,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
