"""Which key speaks for which site: sites sign what they send, and the server knows their public keys by name.

Flower binds a node's number to a registered key, but its apps see the number alone; so a node could claim any site's
name. With ``sites.json``, which ``comfedl flower certs`` writes, a site's name is bound to its key.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, RecordDict

from comfedl.flower.serialization import TENSORS, TEXT
from comfedl.utils.errors import ConfigError, RunFolderError
from comfedl.utils.files import write_atomic
from comfedl.utils.read_back import read_object

logger = logging.getLogger("comfedl")

SITES = "sites.json"  # beside the keys
SIGNATURE = "signature"
PURPOSE = b"comfedl: a site's reply, version 1"
HASH = ec.ECDSA(hashes.SHA384())


def public_text(key: ec.EllipticCurvePublicKey) -> str:
    """A public key as one line, as in a .pub file."""
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH).decode()


def read_public(text: str) -> ec.EllipticCurvePublicKey:
    """The inverse, which also reads a line with a comment; raises a ValueError."""
    try:
        key = serialization.load_ssh_public_key(" ".join(text.split()[:2]).encode())
    except UnsupportedAlgorithm as error:
        raise ValueError(str(error)) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ValueError("it is no ECDSA key")
    return key


def read_private(path: Path) -> ec.EllipticCurvePrivateKey:
    """A site's private key, as ``comfedl flower certs`` or ``ssh-keygen -t ecdsa`` writes it."""
    try:
        data = path.read_bytes()
        load = serialization.load_ssh_private_key if b"OPENSSH" in data else serialization.load_pem_private_key
        key = load(data, None)
    except (OSError, ValueError, TypeError, UnsupportedAlgorithm) as error:
        why = getattr(error, "strerror", None) or type(error).__name__
        raise ConfigError(f"The site's key cannot be read ({why}); correct key in the node config.") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError("The site's key is no ECDSA key; make one with comfedl flower certs.")
    return key


def signed_part(node: int, question: RecordDict, reply: RecordDict) -> bytes:
    """The bytes that a signature is of: what was asked, of whom, and the reply; no question is asked twice.

    The node's number keeps a site from handing on the question to another one.
    """
    parts = [str(node).encode(), _text(question), _text(reply)]
    parts.append(reply.array_records[TENSORS]["all"].data if TENSORS in reply.array_records else b"")
    return PURPOSE + b"".join(hashlib.sha384(part).digest() for part in parts)


def _text(content: RecordDict) -> bytes:
    return str(content.config_records[TEXT]["json"]).encode()


def sign(key: Path, node: int, question: RecordDict, reply: RecordDict) -> None:
    """Add a site's signature to its reply."""
    signature = read_private(key).sign(signed_part(node, question, reply), HASH)
    reply[SIGNATURE] = ConfigRecord({"bytes": signature})


class SiteKeys:
    """The public keys of the sites by name, from a file that may change during a run.

    Args:
        path: the file, a JSON object of names and public keys as in .pub files.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._keys = read_site_keys(path)
        except RunFolderError as error:
            raise ConfigError(f"flower.keys: {error}") from None

    def reload(self) -> set[str]:
        """Read the file again; return the sites whose key is another one now, or new, or gone."""
        try:
            now = read_site_keys(self._path)
        except RunFolderError as error:
            logger.warning("The keys of the sites stay as they were: %s", error)
            return set()
        before, self._keys = self._keys, now
        texts = [{name: public_text(key) for name, key in keys.items()} for keys in (before, now)]
        return {name for name in before.keys() | now.keys() if texts[0].get(name) != texts[1].get(name)}

    def fault(self, name: str, node: int, question: RecordDict, reply: RecordDict) -> str | None:
        """Why a reply is not the site's; None if it is."""
        key = self._keys.get(name)
        if key is None:
            return f"there is no key for {name!r} in {self._path.name}"
        given = reply.config_records[SIGNATURE].get("bytes") if SIGNATURE in reply.config_records else None
        if not isinstance(given, bytes):
            return 'it has no signature; name the site\'s private key in the node config (key="...")'
        try:
            key.verify(given, signed_part(node, question, reply), HASH)
        except (InvalidSignature, KeyError, ValueError, TypeError, AttributeError):  # a reply may hold anything
            return f"its signature is not by the key of {name!r}"
        return None


def read_site_keys(path: Path) -> dict[str, ec.EllipticCurvePublicKey]:
    """The public keys of sites.json by the sites' names."""
    found = read_object(path)
    keys = {}
    for name, text in found.items():
        try:
            keys[name] = read_public(str(text))
        except ValueError as error:
            raise RunFolderError(f"{path} has no usable key for {name!r} ({error}); correct it.") from None
    return keys


def site_keys_text(keys: Mapping[str, str]) -> str:
    """The text of sites.json, from the lines of .pub files by the sites' names."""
    return json.dumps({name: " ".join(text.split()[:2]) for name, text in sorted(keys.items())}, indent=1) + "\n"


def write_site_keys(path: Path, keys: Mapping[str, str]) -> None:
    """Write or replace sites.json; whoever reads it meanwhile gets the old one or the new one."""
    try:
        write_atomic(path, site_keys_text(keys).encode())
    except OSError as error:
        raise RunFolderError(f"{path} cannot be written ({error.strerror}); give another folder.") from error
