"""The server's side of the protocol: it carries keys and sealed shares between the sites, and removes the masks.

An exchange has three stages: "share", "mask" and "unmask". The shares for the next exchange come with the answers to
"unmask", so that where every message is slow, an exchange takes two of them.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, islice
from typing import Any

import numpy as np

from comfedl.secure import shamir
from comfedl.secure.primitives import KEY, add_mask, agree, new_secret, public_key
from comfedl.secure.ring import Words, total
from comfedl.secure.settings import FEWEST, SecureAggregation
from comfedl.secure.site import SHARE, Ask, commitment, own_mask, pair_purpose, place_of, sign
from comfedl.utils.errors import MalformedMessage, QuorumError

Answer = Ask | str
"""A site's answer, or why there is none."""
Send = Callable[[str, Mapping[str, Ask]], Mapping[str, Answer]]
"""Sends sites their asks of a stage. What a site has masked is under "words" in its answer."""
Like = Sequence[tuple[np.dtype[Any], int]]
"""The type and length of each vector of words."""
SILENT = "it does not answer"
MOST_TRIED = 1000  # sets of shares, where some are false
HEX = re.compile("(?:[0-9a-f]{2})+")  # bytes.fromhex also takes blanks


@dataclass
class _Exchange:
    """An exchange that sites have shared their secrets for."""

    name: str
    threshold: int
    keys: dict[str, str]
    shared: dict[str, Ask] = field(default_factory=dict)

    @property
    def ask(self) -> Ask:
        return {"stage": "share", "exchange": self.name, "threshold": self.threshold, "keys": self.keys}

    @property
    def known(self) -> dict[str, Any]:
        return {"threshold": self.threshold, "keys": self.keys}

    @property
    def mask_keys(self) -> dict[str, str]:
        return {name: answer["mask_key"] for name, answer in sorted(self.shared.items())}


@dataclass(frozen=True)
class Outcome:
    """The sum of the words of the sites that stayed, and why the others did not."""

    words: list[Words]
    sites: list[str]
    absent: dict[str, str]


class SecureServer:
    """One session with sites, by their names. In a new session, as after a resume, all keys are new."""

    def __init__(self, settings: SecureAggregation, send: Send) -> None:
        self._settings, self._send = settings, send
        self._session, self._exchanges = secrets.token_hex(16), 0
        self._keys: dict[str, str] = {}
        self._next: _Exchange | None = None

    def sum(self, sites: Sequence[str], what: str, task: bytes, like: Like, whole: bool = False) -> Outcome:
        """The sum of the words that these sites compute for a task with this digest; ``what`` begins an error.

        ``whole`` is whether all of them must be in the sum, as when it repeats one over the same sites: the difference
        of sums over two sets of sites would be that of the sites in which the sets differ.

        Raises:
            QuorumError: fewer sites than the threshold stayed until the end, or, with ``whole``, sent their numbers.
        """
        absent: dict[str, str] = {}
        exchange = self._begin(sites, what, absent)
        if whole:
            check_whole(sites, exchange.shared, what, absent)
        mask_keys = exchange.mask_keys
        masked = self._ask("mask", {name: {"exchange": exchange.name, "mask_keys": mask_keys} for name in mask_keys})
        words: dict[str, list[Words]] = {}
        for name in mask_keys:
            try:
                words[name] = _checked_words(masked[name], like)
            except MalformedMessage as error:
                absent[name] = str(error)
        self._check(words, exchange, what, "sent their masked numbers", absent)
        if whole:
            check_whole(sites, words, what, absent)
        dropped = sorted(mask_keys.keys() - words.keys())
        found = [total(parts) for parts in zip(*words.values(), strict=True)]
        shares = self._shares(exchange, sorted(words), dropped, what, absent, expected=sorted(words) == sorted(sites))
        for name in words:
            seed = _joined(shares[name], exchange, exchange.shared[name]["commitment"], commitment)
            if seed is None:
                raise _false_share(what, name)
            add_mask(found, own_mask(seed), -1)
        purpose = pair_purpose(self._session, exchange.name, exchange.known, mask_keys, task)
        for name in dropped:
            secret = _joined(shares[name], exchange, mask_keys[name], _public_hex)
            if secret is None:
                raise _false_share(what, name)
            for other in words:
                key = agree(secret, bytes.fromhex(mask_keys[other]), purpose)
                add_mask(found, key, -sign(other, name))
        return Outcome(found, [name for name in sites if name in words], absent)

    def _begin(self, sites: Sequence[str], what: str, absent: dict[str, str]) -> _Exchange:
        """The exchange that was begun with the one before if it is for the same sites, or a new one."""
        exchange, self._next = self._next, None
        if exchange is not None and exchange.keys.keys() == exchange.shared.keys() == {*sites}:
            return exchange
        new = [name for name in sites if name not in self._keys]
        for name, answer in self._ask("keys", {name: {} for name in new}).items():
            try:
                self._keys[name] = _checked_key(answer, "key")
            except MalformedMessage as error:
                absent[name] = str(error)
        exchange = self._new(sites)
        if len(exchange.keys) < max(FEWEST, self._settings.needed(len(sites))):
            self._check({}, exchange, what, f"of {len(sites)} sent a key", absent, len(exchange.keys))
        for name, answer in self._ask("share", dict.fromkeys(exchange.keys, exchange.ask)).items():
            self._accept_shares(exchange, name, answer, absent)
        self._check(exchange.shared, exchange, what, "shared their keys", absent)
        return exchange

    def _new(self, sites: Sequence[str]) -> _Exchange:
        self._exchanges += 1
        keys = {name: self._keys[name] for name in sorted(sites) if name in self._keys}
        return _Exchange(f"{self._exchanges}", self._settings.needed(len(keys)), keys)

    def _accept_shares(self, exchange: _Exchange, name: str, answer: Answer, absent: dict[str, str]) -> None:
        try:
            _checked_key(answer, "mask_key")
            assert isinstance(answer, dict)
            shares = answer.get("shares")
            if not isinstance(shares, dict) or shares.keys() != exchange.keys.keys():
                raise MalformedMessage("its shares are not for the sites that take part")
            for text in (answer.get("commitment"), *shares.values()):
                _checked_hex(text, 16 * SHARE)
            exchange.shared[name] = answer
        except MalformedMessage as error:
            absent[name] = str(error)
            self._keys.pop(name, None)  # it may have lost its keys; it is asked for new ones

    def _shares(
        self,
        exchange: _Exchange,
        alive: list[str],
        dropped: list[str],
        what: str,
        absent: dict[str, str],
        expected: bool,
    ) -> dict[str, dict[int, int]]:
        """Of each site, the shares that the sites that stayed reveal, by their places."""
        following = self._new(alive) if expected else None
        places, sealed = place_of(exchange.keys), {name: exchange.shared[name]["shares"] for name in (*alive, *dropped)}
        asks: dict[str, Ask] = {
            name: {
                **{"exchange": exchange.name, "alive": alive, "dropped": dropped},
                "shares": {sender: of[name] for sender, of in sealed.items()},
                **({} if following is None else {"next": {**following.ask, "session": self._session}}),
            }
            for name in alive
        }
        found: dict[str, dict[int, int]] = {name: {} for name in (*alive, *dropped)}
        gone: dict[str, str] = {}
        for name, answer in self._ask("unmask", asks).items():
            try:
                revealed = answer.get("shares") if isinstance(answer, dict) else None
                if not isinstance(revealed, dict):
                    raise MalformedMessage(answer if isinstance(answer, str) else "its answer has no shares")
                for sender, share in revealed.items():
                    if sender in found:
                        found[sender][places[name]] = int(_checked_hex(share, SHARE), 16)
            except MalformedMessage as error:
                gone[name] = str(error)
                continue
            if following is not None and isinstance(answer, dict) and "next" in answer:
                self._accept_shares(following, name, answer["next"], {})
        for shares in found.values():
            if len(shares) < exchange.threshold:
                self._check({}, exchange, what, "helped to remove the masks", absent | gone, len(shares))
        self._next = following
        return found

    def _ask(self, stage: str, asks: Mapping[str, Ask]) -> dict[str, Answer]:
        """Every site's answer, or why there is none."""
        whole = {name: {"stage": stage, "session": self._session, **ask} for name, ask in asks.items()}
        answers = self._send(stage, whole) if whole else {}
        return {name: answers.get(name, SILENT) for name in asks}

    def _check(
        self,
        present: Mapping[str, Any],
        exchange: _Exchange,
        what: str,
        did: str,
        absent: Mapping[str, str],
        count: int | None = None,
    ) -> None:
        """Stop unless the threshold of sites are present; ``count`` is how many of those who cannot be enough."""
        if count is None and len(present) >= exchange.threshold:
            return
        given = len(present) if count is None else count
        example = "".join(f" (site {name!r}: {reason.rstrip('.')})" for name, reason in sorted(absent.items())[:1])
        raise QuorumError(
            f"{what}: only {given} of {len(exchange.keys)} sites {did}{example}, but secure aggregation needs "
            f"{max(FEWEST, exchange.threshold)}, so the sum stays hidden; fix the others and resume, or lower "
            "threshold."
        )


def check_whole(sites: Sequence[str], present: Collection[str], what: str, absent: Mapping[str, str]) -> None:
    """Stop if one of the sites is missing from a sum that must be over all of them."""
    for name in sites:
        if name not in present:
            reason = absent.get(name, SILENT).rstrip(".")
            raise QuorumError(
                f"{what}: site {name!r} is missing ({reason}), but the round needs another sum over exactly the sites "
                "of the one before, since the difference of the two would be its own, so the sum stays hidden; resume."
            )


def _false_share(what: str, name: str) -> QuorumError:
    return QuorumError(
        f"{what}: the shares of site {name!r}'s secret do not fit what it announced, so some site sent a false one and "
        "the sum stays hidden; resume, and find out which site differs from the others."
    )


def _public_hex(secret: bytes) -> str:
    return public_key(secret).hex()


def _joined(shares: Mapping[int, int], exchange: _Exchange, announced: str, of: Callable[[bytes], str]) -> bytes | None:
    """The secret of a site that has announced what ``of`` makes of it; None if the shares do not give it.

    As many shares are taken as are needed, and others in their place if some are false.
    """
    for chosen in islice(combinations(sorted(shares.items()), exchange.threshold), MOST_TRIED):
        found = shamir.join(dict(chosen))
        if found < 2 ** (8 * KEY) and of(found.to_bytes(KEY)) == announced:
            return found.to_bytes(KEY)
    return None


def _checked_words(answer: Answer, like: Like) -> list[Words]:
    """The masked numbers of an answer, if they are what was asked for."""
    if isinstance(answer, str):
        raise MalformedMessage(answer)
    words = answer.get("words")
    if not isinstance(words, list) or not all(isinstance(part, np.ndarray) for part in words):
        raise MalformedMessage("its answer has no masked numbers")
    if [(part.dtype, part.shape) for part in words] != [(kind, (length,)) for kind, length in like]:
        raise MalformedMessage("its masked numbers are not as many as were asked for")
    return words


def _checked_key(answer: Answer, name: str) -> str:
    """A public key of an answer."""
    if isinstance(answer, str):
        raise MalformedMessage(answer)
    text = _checked_hex(answer.get(name), KEY)
    try:
        if len(text) != 2 * KEY:
            raise ValueError
        agree(new_secret(), bytes.fromhex(text), b"trial")  # of some points nobody can derive a key
    except ValueError:
        raise MalformedMessage(f"its {name} is no public key") from None
    return text


def _checked_hex(text: Any, most: int) -> str:
    """Bytes as text, of which there are no more than ``most``."""
    if not isinstance(text, str) or len(text) > 2 * most or not HEX.fullmatch(text):
        raise MalformedMessage("its answer is not as the protocol has it")
    return text
