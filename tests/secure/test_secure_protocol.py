"""The protocol, for any sites that drop out, and against a server or sites that do not keep to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from scipy import stats

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'comfedl[secure]'")

import comfedl as cf
from comfedl.secure.ring import Words
from comfedl.secure.server import Answer
from comfedl.secure.settings import SecureAggregation
from comfedl.secure.site import Ask, Refused, SecureSite
from helpers.secure_network import TASK, Network


@given(count=st.integers(3, 9), data=st.data())
@settings(deadline=None, max_examples=60)
def test_masks_cancel_for_any_set_of_dropouts(count: int, data: st.DataObject) -> None:
    """Up to the threshold, at any stage and over several exchanges, the sum is the plain one of those that stayed."""
    network = Network(count)
    can_go = count - SecureAggregation().needed(count)
    for _ in range(3):
        gone = data.draw(st.lists(st.sampled_from(network.names), max_size=can_go, unique=True))
        when = {name: data.draw(st.sampled_from(["share", "mask", "unmask"])) for name in gone}
        network.lost = {stage: [name for name in gone if when[name] == stage] for stage in ("share", "mask", "unmask")}
        network.server._next = None  # so that "share" is a message of its own, which can be lost
        found = network.sum()
        # A site that is gone before the keys are shared is not needed later, so that others may go in its place.
        assert found == ([name for name in network.names if when.get(name) not in ("share", "mask")], True)


def test_an_exchange_takes_two_messages_once_the_first_is_done() -> None:
    network = Network(5)
    for _ in range(3):
        assert network.sum() == (network.names, True)
    assert network.stages == ["keys", "share", "mask", "unmask", *["mask", "unmask"] * 2]


@pytest.mark.parametrize("stage", ["share", "mask", "unmask"])
def test_fewer_than_the_threshold_end_it_in_a_sentence(stage: str) -> None:
    network = Network(9)
    network.lost = {stage: network.names[:4]}
    with pytest.raises(cf.QuorumError, match=r"Round 1: only 5 of 9 sites .* needs 6, so the sum stays hidden"):
        network.sum()
    network.lost = {stage: network.names[:3]}
    assert network.sum()[1]
    network.lost = {}
    assert network.sum() == (network.names, True)


def test_too_few_sites_with_keys_end_it_as_well() -> None:
    network = Network(9)
    network.lost = {"keys": network.names[:7]}
    with pytest.raises(cf.QuorumError, match="of 9 sent a key"):
        network.sum()


def test_a_site_that_has_lost_its_keys_comes_back_with_new_ones() -> None:
    network = Network(5)
    assert network.sum()[1]
    network.stored["site 1"] = json.dumps(SecureSite("site 1").state)
    assert network.sum() == ([name for name in network.names if name != "site 1"], True)
    assert network.sum()[1]
    assert network.sum() == (network.names, True)


# What the server sees.


def uniform(words: list[Words]) -> float:
    """The p-value of a chi-square test that all bytes are equally frequent."""
    counts = np.bincount(np.frombuffer(b"".join(part.tobytes() for part in words), dtype=np.uint8), minlength=256)
    return float(stats.chisquare(counts).pvalue)


def test_what_a_site_sends_is_uniform_also_when_others_drop_out() -> None:
    network = Network(4, length=60_000)
    for name in network.names:
        network.words[name] = [np.zeros(60_000, dtype=np.uint64), np.zeros(3, dtype=np.uint32)]
    network.lost = {"mask": ["site 3"]}
    assert network.sum()[1]
    assert uniform(network.words["site 0"]) < 1e-9  # the test sees what is not
    for name in network.names[:3]:
        assert uniform(network.masked[name]) > 1e-6
    # Nor do two sites' masks, or those of two exchanges, have anything in common.
    first = [part.copy() for part in network.masked["site 0"]]
    assert uniform([first[0] - network.masked["site 1"][0]]) > 1e-6
    network.lost = {}
    assert network.sum()[1]
    assert uniform([network.masked["site 0"][0] - first[0]]) > 1e-6


def test_after_the_end_a_site_s_numbers_still_have_a_mask() -> None:
    """Of a site that stayed the server learns its own mask; of one that dropped out, its mask key. Never both."""
    network = Network(6)
    revealed: dict[str, dict[str, list[str]]] = {}

    def watch(stage: str, name: str, answer: Ask) -> Ask:
        if stage == "unmask":
            revealed[name] = answer["shares"]
        return answer

    network.change = watch  # type: ignore[assignment]
    network.lost = {"mask": ["site 5"]}
    asked: dict[str, Ask] = {}

    def remember(stage: str, name: str, ask: Ask) -> Ask:
        asked[stage + name] = ask
        return ask

    network.alter_ask = remember  # type: ignore[assignment]
    assert network.sum()[1]
    assert {len(shares) for shares in revealed.values()} == {6}  # one share of each site
    ask = asked["unmasksite 0"]
    other = {**ask, "alive": [*ask["alive"], "site 5"], "dropped": []}
    with pytest.raises(Refused, match="not at the stage 'masked'"):
        network.site("site 0").unmask(other)


# An active server.


def masked_site(network: Network) -> tuple[SecureSite, Ask]:
    """A site that has masked its numbers, and what it would be asked next."""
    caught: dict[str, Ask] = {}

    def catch(stage: str, name: str, ask: Ask) -> Ask:
        caught[name] = ask
        return ask

    network.alter_ask = catch  # type: ignore[assignment]
    network.lost = {"unmask": network.names}
    with pytest.raises(cf.QuorumError):
        network.sum()
    network.lost = {}
    asks: dict[str, Ask] = {}

    def send(stage: str, given: Mapping[str, Ask]) -> dict[str, Answer]:
        if stage == "unmask":
            asks.update(given)
            return {}
        return network.send(stage, given)

    network.server._send = send
    with pytest.raises(cf.QuorumError):
        network.sum()
    return network.site("site 0"), asks["site 0"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"alive": ["site 0", "site 1", "site 2", "site 3"], "dropped": ["site 3", "site 4"]}, "each once"),
        ({"alive": ["site 0", "site 1", "site 2", "site 3"], "dropped": []}, "each once"),
        ({"alive": ["site 1", "site 2", "site 3", "site 4"], "dropped": ["site 0"]}, "4 sites stayed with this one"),
        ({"alive": ["site 0", "site 1", "site 2"], "dropped": ["site 3", "site 4"]}, "3 sites stayed"),
        ({"session": "another"}, "does not know this session"),
        ({"exchange": "99"}, "unknown"),
    ],
)
def test_a_site_does_not_help_a_server_that_lies(change: Mapping[str, Any], reason: str) -> None:
    site, ask = masked_site(Network(5))
    with pytest.raises(Refused, match=reason):
        site.unmask({**ask, **change})
    assert site.unmask(ask)["shares"]  # the honest ask is answered, once
    with pytest.raises(Refused, match="not at the stage 'masked'"):
        site.unmask(ask)


def test_a_site_masks_once_in_an_exchange() -> None:
    site, ask = masked_site(Network(5))
    known = site.state["exchanges"][ask["exchange"]]
    again = {**ask, "stage": "mask", "mask_keys": known["mask_keys"]}
    with pytest.raises(Refused, match="not at the stage 'shared'"):
        site.mask(again, TASK, [])


def test_a_site_refuses_a_threshold_of_half_or_less_and_keys_without_its_own() -> None:
    network = Network(5)
    assert network.sum()[1]
    site, keys = network.site("site 0"), dict(network.server._keys)
    ask = {"stage": "share", "session": network.server._session, "exchange": "new", "threshold": 4, "keys": keys}
    for threshold in (1, 2, 6):
        with pytest.raises(Refused, match="would not protect"):
            site.share({**ask, "threshold": threshold})
    with pytest.raises(Refused, match="its own key"):
        site.share({**ask, "keys": {**keys, "site 0": keys["site 1"]}})
    assert site.share(ask)
    with pytest.raises(Refused, match="has begun already"):
        site.share(ask)


@pytest.mark.parametrize("what", ["task", "mask_keys"])
def test_sites_that_were_told_different_things_do_not_add_up(what: str) -> None:
    network = Network(5)
    before = network.site

    def site(name: str) -> SecureSite:
        found = before(name)
        if name == "site 2" and what == "task":
            mask = found.mask
            found.mask = lambda ask, task, *more: mask(ask, b"another task", *more)  # type: ignore[method-assign]
        return found

    network.site = site  # type: ignore[method-assign]
    if what == "mask_keys":

        def fewer(stage: str, name: str, ask: Ask) -> Ask:
            if stage != "mask" or name != "site 2":
                return ask
            return {**ask, "mask_keys": {name: key for name, key in ask["mask_keys"].items() if name != "site 4"}}

        network.alter_ask = fewer  # type: ignore[assignment]
        with pytest.raises(cf.QuorumError):  # nor does it help to remove masks that it does not know
            network.lost = {"unmask": ["site 0"]}
            network.sum()
    else:
        assert network.sum() == (network.names, False)


# Sites that send anything.


@pytest.mark.parametrize("stage", ["keys", "share", "mask", "unmask"])
@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"key": 3, "mask_key": 3, "words": 3, "shares": 3},
        {"key": "zz", "mask_key": "ab", "words": [1], "shares": {}},
    ],
)
def test_a_site_that_answers_nonsense_is_left_out(stage: str, answer: Ask) -> None:
    network = Network(5)
    network.change = lambda at, name, given: answer if (at, name) == (stage, "site 1") else given
    sites, plain = network.sum()
    assert plain
    assert ("site 1" in sites) == (stage == "unmask")


def test_a_false_share_is_noticed() -> None:
    network = Network(5)

    def lie(stage: str, name: str, answer: Ask) -> Ask:
        if (stage, name) != ("unmask", "site 0"):
            return answer
        return {**answer, "shares": dict.fromkeys(answer["shares"], "01" * 33)}

    network.change = lie  # type: ignore[assignment]
    assert network.sum() == (network.names, True)  # the others have shares enough
    network.lost = {"unmask": ["site 1"]}
    with pytest.raises(cf.QuorumError, match="some site sent a false one"):
        network.sum()


@pytest.mark.parametrize("value", [0.3, 0.49, 1.5, "all", None])
def test_a_threshold_is_more_than_half(value: object) -> None:
    with pytest.raises(cf.ConfigError, match="threshold is"):
        SecureAggregation(threshold=value)  # type: ignore[arg-type]
    assert all(2 * SecureAggregation(threshold=0.5).needed(n) > n for n in range(1, 50))
