"""Per-client records: flat arrays that read as rows."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from comfedl.core.client_statistics import Row, summarise_columns
from comfedl.engines.replies import LocalReplies, ReplyPart, StackedReplies
from comfedl.training.client_records import ClientRows, Evaluation, few_as_list
from helpers.handmade import summarise_clients

NAMES = tuple("abcdefgh")
KINDS = (("train.loss",), ("train.loss", "test.loss"), ("train.loss", "validation.loss", "test.loss"))
NUMBERS = st.floats(-1e6, 1e6, width=32)


def local(clients: list[int], scores: list[dict[str, float]]) -> LocalReplies:
    tensors = [{name: torch.tensor(value) for name, value in each.items()} for each in scores]
    return LocalReplies(clients, [{"scores": each} for each in tensors])


@st.composite
def evaluations(draw: st.DrawFn) -> tuple[list[int], list[dict[str, float]]]:
    clients = sorted(draw(st.sets(st.integers(0, 7), min_size=1)))
    return clients, [{name: draw(NUMBERS) for name in draw(st.sampled_from(KINDS))} for _ in clients]


@settings(deadline=None)
@given(given_=evaluations(), dual=st.booleans())
def test_an_evaluation_reads_as_its_rows(given_: tuple[list[int], list[dict[str, float]]], dual: bool) -> None:
    clients, scores = given_
    more = {"weight": np.arange(len(clients)) / 8} | ({"dual": np.ones(len(clients))} if dual else {})
    found = Evaluation.of(3, NAMES, clients, local(clients, scores).scores("scores"), more)
    rows: list[Row] = [
        {"round": 3, "client": NAMES[i], **each, **{name: float(values[k]) for name, values in more.items()}}
        for k, (i, each) in enumerate(zip(clients, scores, strict=True))
    ]
    assert list(found) == rows and [list(row) for row in found] == [list(row) for row in rows]
    assert found[-1] == rows[-1] and found[1:3] == rows[1:3] and len(found) == len(rows)
    assert json.dumps(found[0]) == json.dumps(rows[0])
    told = summarise_columns(found.columns(leave_out=more))
    assert list(told.items()) == list(summarise_clients(scores).items())
    again = ClientRows.read(iter(rows), NAMES)
    assert again == rows and rows == again and list(again) == rows


def test_rows_of_several_rounds() -> None:
    blocks = [
        Evaluation.of(number, NAMES, [0, 2], local([0, 2], [{"a": 1.0}, {"a": 2.0}]).scores("scores"), {})
        for number in (5, 10)
    ]
    rows = ClientRows(blocks)
    whole = [{"round": n, "client": c, "a": v} for n in (5, 10) for c, v in (("a", 1.0), ("c", 2.0))]
    assert len(rows) == 4 and rows == whole and rows == ClientRows.read(whole, NAMES)
    assert [rows[k] for k in range(-4, 4)] == whole + whole
    assert rows[1:3] == whole[1:3] and rows[::-1] == whole[::-1]
    assert rows != whole[:3] and rows != [*whole[:3], {}] and rows != "rows"
    with pytest.raises(IndexError):
        rows[4]
    assert len(ClientRows()) == 0 and ClientRows() == []
    assert isinstance(few_as_list(rows), list)


def test_many_rows_are_not_made_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("comfedl.training.client_records.FEW", 1)
    rows: Any = ClientRows.read([{"round": 1, "client": name, "x": 0.5} for name in "ab"], NAMES)
    assert few_as_list(rows) is rows


def test_scores_of_stacked_replies_are_those_of_single_ones() -> None:
    """Parts with other names, in another order than the clients, and one client that was asked twice."""

    def number(client: int, name: str) -> float:
        return client + len(name) / 8

    parts = [((4, 1), KINDS[1]), ((0,), KINDS[0]), ((3, 2), KINDS[1])]
    stacked = [
        ReplyPart(who, {"scores": {name: torch.tensor([number(i, name) for i in who]) for name in names}})
        for who, names in parts
    ]
    clients = [0, 1, 2, 3, 4, 1]
    kind = {i: names for who, names in parts for i in who}
    single = local(clients, [{name: number(i, name) for name in kind[i]} for i in clients])
    ours, theirs = (
        Evaluation.of(1, NAMES, clients, replies.scores("scores"), {})
        for replies in (StackedReplies(clients, stacked), single)
    )
    assert list(ours) == list(theirs)
    left = StackedReplies(clients, stacked).without([0]).scores("scores")
    assert [each.names for each in left] == [KINDS[1]]
