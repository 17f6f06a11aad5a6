"""What a sum over few sites, or over two sets of sites, would give away, and that sites and server refuse it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'comfedl[secure]'")

import comfedl as cf
from comfedl.secure.primitives import public_key
from comfedl.secure.settings import SecureAggregation
from comfedl.secure.site import Ask, Refused, SecureSite
from helpers.secure_network import TASK, Network

LOW_ORDER = "00" * 32  # a point with which every secret gives the same key


@pytest.mark.parametrize("count", [1, 2])
def test_a_site_shares_no_keys_with_fewer_than_three(count: int) -> None:
    """A lone site would be asked to mask and to unmask what nobody else's masks hide."""
    site = SecureSite("a")
    keys = {"a": site.keys({"session": "s"})["key"], "b": public_key(b"\x01" * 32).hex()}
    ask = {"session": "s", "exchange": "1", "threshold": count, "keys": dict([*keys.items()][:count])}
    with pytest.raises(Refused, match=f"a sum over {count} sites"):
        site.share(ask)


def test_three_sites_are_always_needed() -> None:
    assert [SecureAggregation(threshold=0.5).needed(sites) for sites in range(1, 8)] == [1, 2, 3, 3, 3, 4, 4]
    network = Network(3)
    network.lost = {"mask": ["site 2"]}
    with pytest.raises(cf.QuorumError, match=r"only 2 of 3 sites .* needs 3"):
        network.sum()


def asked(network: Network, stage: str, whole: bool = False) -> Ask:
    """What site 0 is asked at a stage, of which no ask arrives."""
    seen: dict[str, Ask] = {}

    def send(at: str, given: Mapping[str, Ask]) -> dict[str, Any]:
        seen[at] = given["site 0"]
        return {} if at == stage else network.send(at, given)

    network.server._send = send
    with pytest.raises(cf.QuorumError):
        network.sum(whole)
    return seen[stage]


def test_a_site_helps_to_open_no_sum_of_two() -> None:
    """Also where a server has said that a threshold of two is enough."""
    network = Network(3)
    network.alter_ask = lambda stage, name, ask: {**ask, "threshold": 2} if stage == "share" else ask
    ask = asked(network, "unmask")
    site = network.site("site 0")
    assert site.state["exchanges"]["1"]["threshold"] == 2
    with pytest.raises(Refused, match="2 sites stayed with this one, and 3 must"):
        site.unmask({**ask, "alive": ["site 0", "site 1"], "dropped": ["site 2"]})


def test_a_site_keeps_to_the_threshold_of_its_config() -> None:
    network = Network(9, SecureAggregation(threshold=0.5))
    ask = asked(network, "mask")
    site = network.site("site 0")
    site.check_threshold(ask, SecureAggregation(threshold=0.5))
    with pytest.raises(Refused, match="a threshold of 5 of 9 sites, but its config asks for 6"):
        site.check_threshold(ask, SecureAggregation())


# Sums over exactly the same sites.


@pytest.mark.parametrize("stage", ["share", "mask"])
def test_a_whole_sum_ends_before_it_is_opened_if_a_site_is_missing(stage: str) -> None:
    network = Network(5)
    assert network.sum()[1]
    network.server._next = None
    network.lost = {stage: ["site 3"]}
    network.stages.clear()
    with pytest.raises(cf.QuorumError, match=r"site 'site 3' is missing .* exactly the sites of the one before"):
        network.sum(whole=True)
    assert "unmask" not in network.stages
    network.lost = {"unmask": ["site 3"]}  # it is in the sum, and the others remove its mask
    assert network.sum(whole=True) == (network.names, True)


def test_a_site_opens_no_whole_sum_without_the_others() -> None:
    network = Network(5)
    ask = asked(network, "unmask", whole=True)
    with pytest.raises(Refused, match="4 sites stayed with this one, and 5 must"):
        network.site("site 0").unmask({**ask, "alive": network.names[:4], "dropped": ["site 4"]})
    network = Network(5)
    ask = asked(network, "mask", whole=True)
    four = {name: key for name, key in ask["mask_keys"].items() if name != "site 4"}
    with pytest.raises(Refused, match="all of the 5 at the start must"):
        network.site("site 0").mask({**ask, "mask_keys": four}, TASK, [], whole=True)


# Keys.


@pytest.mark.parametrize("stage", ["keys", "share"])
@pytest.mark.parametrize("key", [LOW_ORDER, "ab " * 21 + "a", " " + "ab" * 31 + "c", "AB" * 32])
def test_a_key_that_is_none_harms_its_own_site_alone(stage: str, key: str) -> None:
    """A blank counts for nothing in ``bytes.fromhex``, and with a point of low order every other site would fail."""
    network = Network(5)
    part = {"keys": "key", "share": "mask_key"}[stage]
    network.change = lambda at, name, answer: {**answer, part: key} if (at, name) == (stage, "site 1") else answer
    sites, plain = network.sum()
    assert plain and sites == [name for name in network.names if name != "site 1"]


def test_too_few_shares_of_a_site_that_dropped_out_are_not_called_false() -> None:
    network = Network(5)

    def forget(stage: str, name: str, answer: Ask) -> Ask:
        if stage != "unmask" or name not in ("site 0", "site 1"):
            return answer
        return {**answer, "shares": {of: share for of, share in answer["shares"].items() if of != "site 4"}}

    network.change = forget  # type: ignore[assignment]
    network.lost = {"mask": ["site 4"]}
    with pytest.raises(cf.QuorumError, match="only 2 of 5 sites helped to remove the masks"):
        network.sum()
