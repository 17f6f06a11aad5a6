"""A site's side of the protocol: its keys, its shares of others' secrets, its masked numbers.

Asks and answers are dicts that JSON can hold. A site answers each stage of an exchange once: a second answer to "mask"
would reveal the difference of two updates, and one to "unmask" could give away both secrets of another site.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from comfedl.secure import shamir
from comfedl.secure.primitives import KEY, Unsealable, add_mask, agree, derive, new_secret, public_key, seal, unseal
from comfedl.secure.ring import Words
from comfedl.secure.settings import FEWEST, SecureAggregation
from comfedl.utils.errors import MalformedMessage

Ask = dict[str, Any]
KEPT = 3  # exchanges whose secrets a site keeps: this one, the next, and one that the server may still end
SHARE = KEY + 1  # bytes of a share: the prime has one bit more than a key


class Refused(MalformedMessage):
    """A site does not do what it is asked, since that could reveal a site's numbers."""


class SecureSite:
    """One site; ``state`` is what it must remember between the messages of a session, private keys included."""

    def __init__(self, name: str, state: Mapping[str, Any] | None = None) -> None:
        self.name = name
        self.state: dict[str, Any] = dict(state or {"session": None})

    def answer(self, ask: Ask) -> Ask:
        """The answer to an ask of any stage but "mask", which needs the numbers; "next" is one for the next exchange.

        Raises:
            Refused: the site does not do this.
        """
        stages = {"keys": self.keys, "share": self.share, "unmask": self.unmask}
        if ask.get("stage") not in stages:
            raise Refused(f"there is no stage {ask.get('stage')!r}")
        found = stages[str(ask["stage"])](ask)
        return {**found, "next": self.share(ask["next"])} if "next" in ask else found

    def keys(self, ask: Ask) -> Ask:
        """Begin a session: the public key under which others seal what is for this site."""
        secret = new_secret()
        self.state = {"session": ask["session"], "secret": secret.hex(), "exchanges": {}}
        return {"key": public_key(secret).hex()}

    def share(self, ask: Ask) -> Ask:
        """Begin an exchange: a new key for masks and the seed of a mask of its own, both shared among all sites."""
        self._check_session(ask)
        exchange, keys, threshold = str(ask["exchange"]), dict(ask["keys"]), int(ask["threshold"])
        if exchange in self.state["exchanges"]:
            raise Refused(f"the exchange {exchange} has begun already")
        if keys.get(self.name) != public_key(self._secret).hex():
            raise Refused("its own key is not among the keys of the sites")
        if len(keys) < FEWEST:
            raise Refused(f"a sum over {len(keys)} sites would give away what each sent; it takes {FEWEST} or more")
        if not len(keys) // 2 < threshold <= len(keys):
            raise Refused(f"a threshold of {threshold} of {len(keys)} sites would not protect them")
        mask_secret, seed = new_secret(), new_secret()
        places = place_of(keys)
        of_key, of_seed = (
            shamir.split(int.from_bytes(secret), list(places.values()), threshold) for secret in (mask_secret, seed)
        )
        sealed = {}
        for name, place in places.items():
            text = of_key[place].to_bytes(SHARE) + of_seed[place].to_bytes(SHARE)
            sealed[name] = seal(self._key_with(keys[name]), text, self._label(exchange, self.name, name)).hex()
        self.state["exchanges"][exchange] = {
            **{"stage": "shared", "threshold": threshold, "keys": keys},
            **{"mask_secret": mask_secret.hex(), "seed": seed.hex()},
        }
        for old in [*self.state["exchanges"]][:-KEPT]:
            del self.state["exchanges"][old]
        return {"mask_key": public_key(mask_secret).hex(), "commitment": commitment(seed), "shares": sealed}

    def check_threshold(self, ask: Ask, settings: SecureAggregation) -> None:
        """Refuse an exchange that fewer sites could end than these settings say."""
        known = self._exchange(ask, "shared")
        needed = settings.needed(len(known["keys"]))
        if known["threshold"] < needed:
            raise Refused(
                f"the exchange has a threshold of {known['threshold']} of {len(known['keys'])} sites, but its config "
                f"asks for {needed}"
            )

    def mask(self, ask: Ask, task: bytes, parts: Sequence[Words], whole: bool = False) -> list[Words]:
        """This site's numbers with all masks; ``task`` is a digest of what it was asked to compute.

        ``whole`` is whether all sites of the exchange must be in the sum.
        """
        known = self.begin_masking(ask, whole)
        masked = [part.copy() for part in parts]
        add_mask(masked, own_mask(bytes.fromhex(known["seed"])), 1)
        secret = bytes.fromhex(known["mask_secret"])
        purpose = pair_purpose(str(ask["session"]), str(ask["exchange"]), known, known["mask_keys"], task)
        for name, key in known["mask_keys"].items():
            if name != self.name:
                add_mask(masked, agree(secret, bytes.fromhex(key), purpose), sign(self.name, name))
        return masked

    def begin_masking(self, ask: Ask, whole: bool = False) -> dict[str, Any]:
        """Check the sites that take part, and use up the secrets of the exchange."""
        known, mask_keys = self._exchange(ask, "shared"), dict(ask["mask_keys"])
        if not mask_keys.keys() <= known["keys"].keys() or len(mask_keys) < known["threshold"]:
            raise Refused(f"{len(mask_keys)} sites take part, and {known['threshold']} of those at the start must")
        if whole and mask_keys.keys() != known["keys"].keys():
            raise Refused(f"{len(mask_keys)} sites take part, and all of the {len(known['keys'])} at the start must")
        if mask_keys.get(self.name) != public_key(bytes.fromhex(known["mask_secret"])).hex():
            raise Refused("its own key is not among the keys for masks")
        if len({*mask_keys.values()}) < len(mask_keys):
            raise Refused("two sites have the same key for masks")
        known |= {"stage": "masked", "mask_keys": mask_keys, "whole": whole}
        return known

    def unmask(self, ask: Ask) -> Ask:
        """Shares to remove the masks: of the own mask of sites that stayed, of the key of those that dropped out."""
        known = self._exchange(ask, "masked")
        alive, dropped = [*map(str, ask["alive"])], [*map(str, ask["dropped"])]
        everybody = [*alive, *dropped]
        if sorted(everybody) != sorted(known["mask_keys"]):
            raise Refused("the sites that stayed and those that dropped out are not those that took part, each once")
        needed = len(everybody) if known.get("whole") else max(FEWEST, known["threshold"])
        if self.name not in alive or len(alive) < needed:
            raise Refused(f"{len(alive)} sites stayed with this one, and {needed} must")
        known["stage"] = "unmasked"
        found = {}
        for name in everybody:
            label = self._label(str(ask["exchange"]), name, self.name)
            try:
                text = unseal(self._key_with(known["keys"][name]), bytes.fromhex(ask["shares"][name]), label)
            except (Unsealable, KeyError, ValueError):
                continue  # the server needs no more than ``threshold`` shares
            found[name] = (text[SHARE:] if name in alive else text[:SHARE]).hex()
        for secret in ("mask_secret", "seed"):  # nobody needs them any more
            del known[secret]
        return {"shares": found}

    @property
    def _secret(self) -> bytes:
        return bytes.fromhex(self.state["secret"])

    def _key_with(self, key: str) -> bytes:
        return agree(self._secret, bytes.fromhex(key), b"shares")

    def _label(self, exchange: str, sender: str, receiver: str) -> bytes:
        return digest([self.state["session"], exchange, sender, receiver])

    def _check_session(self, ask: Ask) -> None:
        if self.state["session"] is None or self.state["session"] != ask["session"]:
            raise Refused("it does not know this session")

    def _exchange(self, ask: Ask, stage: str) -> dict[str, Any]:
        """The exchange, if it is at this stage."""
        self._check_session(ask)
        known: dict[str, Any] | None = self.state["exchanges"].get(str(ask["exchange"]))
        if known is None or known["stage"] != stage:
            now = "unknown" if known is None else f"at the stage {known['stage']!r}"
            raise Refused(f"the exchange {ask['exchange']} is {now} and not at the stage {stage!r}")
        return known


def place_of(keys: Mapping[str, str]) -> dict[str, int]:
    """Each site's place among the shares, from 1."""
    return {name: place for place, name in enumerate(sorted(keys), start=1)}


def sign(name: str, other: str) -> int:
    """The sign of the mask that ``name`` has in common with ``other``, which takes the other one."""
    return 1 if name < other else -1


def commitment(seed: bytes) -> str:
    """What shows, later, that a seed is the one that was shared."""
    return hashlib.sha256(b"comfedl seed " + seed).hexdigest()


def own_mask(seed: bytes) -> bytes:
    """The key of a site's mask of its own."""
    return derive(seed, b"own mask")


def pair_purpose(
    session: str, exchange: str, known: Mapping[str, Any], mask_keys: Mapping[str, str], task: bytes
) -> bytes:
    """All that sites must agree on for their masks to cancel.

    A server that tells one site of other keys, another threshold or another task than the rest gets noise.
    """
    return b"pair " + digest([session, exchange, known["threshold"], known["keys"], mask_keys, task.hex()])


def digest(parts: Any) -> bytes:
    """A hash of plain values."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).digest()
