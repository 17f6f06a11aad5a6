"""A certificate authority, a server certificate and site keys: enough for a trial, an example for production.

``sites.json`` beside the keys has the public key of each site by its name: to it the server binds the sites' names.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from comfedl.flower.site_keys import SITES, public_text, read_site_keys, site_keys_text, write_site_keys
from comfedl.utils.errors import ConfigError, RunFolderError, nearest

DAYS = 365
LOCAL_HOSTS = ("localhost", "127.0.0.1", "::1")


def make_certs(folder: Path, sites: Sequence[str], hosts: Sequence[str] = ()) -> list[Path]:
    """Write ca.crt, ca.key, server.pem, server.key, sites.json, and NAME.key and NAME.pub for every site.

    It never overwrites a file.

    ``hosts`` are the names and addresses under which sites reach the server, in addition to localhost.
    """
    _check_names(sites)
    authority, server = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    issuer = _name("comfedl trial CA")
    ca = _builder(issuer, issuer, authority).add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    ca = ca.add_extension(_usage(signs=True), critical=True)
    ca = ca.add_extension(x509.SubjectKeyIdentifier.from_public_key(authority.public_key()), critical=False)
    cert = _builder(_name("comfedl trial server"), issuer, server)
    cert = cert.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    names = [_host(host) for host in (*LOCAL_HOSTS, *hosts)]
    cert = cert.add_extension(x509.SubjectAlternativeName(names), critical=False)
    cert = cert.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    signed_by = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
    cert = cert.add_extension(signed_by, critical=False)
    files = {
        "ca.crt": ca.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "ca.key": _private(authority),
        "server.pem": cert.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM),
        "server.key": _private(server),
    }
    for site in sites:
        files |= _new_key(site)
    files[SITES] = site_keys_text({site: files[f"{site}.pub"].decode() for site in sites}).encode()
    return _write(folder, files)


def add_sites(folder: Path, sites: Sequence[str]) -> list[Path]:
    """Write a key for each of these sites, which are new, and enter them in sites.json."""
    _check_names(sites)
    known = _known_sites(folder)
    for site in sites:
        if site in known:
            raise ConfigError(f"{site!r} is already in {folder / SITES}; give it a new key with --rotate {site}.")
    files: dict[str, bytes] = {}
    for site in sites:
        files |= _new_key(site)
    written = _write(folder, files)
    try:
        write_site_keys(folder / SITES, known | {site: files[f"{site}.pub"].decode() for site in sites})
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        raise
    return [*written, folder / SITES]


def rotate(folder: Path, site: str) -> list[Path]:
    """Give a site a new key; the old one is kept under another name, and the other sites keep theirs."""
    _check_names([site])
    known = _known_sites(folder)
    _check_known(folder, site, known)
    files = _new_key(site)
    with _set_aside(folder, site):
        written = _write(folder, files)
        write_site_keys(folder / SITES, known | {site: files[f"{site}.pub"].decode()})
    return [*written, folder / SITES]


def revoke(folder: Path, site: str) -> list[Path]:
    """Take a site out of sites.json; its key is kept under another name."""
    _check_names([site])
    known = _known_sites(folder)
    _check_known(folder, site, known)
    with _set_aside(folder, site):
        write_site_keys(folder / SITES, {name: text for name, text in known.items() if name != site})
    return [folder / SITES]


def _check_names(sites: Sequence[str]) -> None:
    for site in sites:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", site) or site in ("ca", "server"):
            raise ConfigError(
                f"A site's name is {site!r}, but it must be usable as a file name: only letters, digits, ., - and _, "
                "and not ca or server."
            )
    if not sites or len({*sites}) < len(sites):
        raise ConfigError(f"The sites are {', '.join(sites) or 'none'}; give at least one, and none twice.")


def _check_known(folder: Path, site: str, known: Mapping[str, str]) -> None:
    if site not in known:
        raise ConfigError(f"{site!r} is not in {folder / SITES}; {nearest(site, known)}.")


def _known_sites(folder: Path) -> dict[str, str]:
    """The sites' public keys; those of a folder of an earlier version are in its .pub files alone."""
    if (folder / SITES).exists():
        return {name: public_text(key) for name, key in read_site_keys(folder / SITES).items()}
    found = {path.stem: path.read_text("utf-8") for path in sorted(folder.glob("*.pub"))} if folder.is_dir() else {}
    if not found:
        raise RunFolderError(f"{folder} has no {SITES}; make keys first with --sites.")
    return found


def _new_key(site: str) -> dict[str, bytes]:
    """The files of a new key for a site."""
    key = ec.generate_private_key(ec.SECP384R1())  # a curve that Flower accepts
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    )
    return {f"{site}.key": private, f"{site}.pub": f"{public_text(key.public_key())} {site}\n".encode()}


@contextmanager
def _set_aside(folder: Path, site: str) -> Iterator[None]:
    """Rename a site's old key files, as far as they are here; undone after an error."""
    number = 1
    while any((folder / f"{site}.{end}.old-{number}").exists() for end in ("key", "pub")):
        number += 1
    moved = [path for end in ("key", "pub") if (path := folder / f"{site}.{end}").exists()]
    try:
        for path in moved:
            path.rename(f"{path}.old-{number}")
        yield
    except BaseException:
        for path in moved:
            if (old := Path(f"{path}.old-{number}")).exists():
                old.replace(path)
        raise


def _write(folder: Path, files: dict[str, bytes]) -> list[Path]:
    existing = [name for name in files if (folder / name).exists()]
    if existing:
        raise RunFolderError(f"{folder} already holds {existing[0]}; give another folder, or remove the old keys.")
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            # Created with the final mode, so that nobody else can ever open a private key.
            mode = 0o600 if name.endswith("key") else 0o644
            handle = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
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
