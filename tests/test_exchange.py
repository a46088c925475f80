"""Routing tables against plain loops over tokens and experts."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from bench.execute.exchange import (  # noqa: E402
    Deal,
    Inbound,
    Route,
    RowMap,
    add_rows,
    all_weights,
    route,
    row_map,
    split,
    weight_gradients,
)

HIDDEN = 3
SHARED_FACTOR = 100.0  # what a shared expert multiplies its input by; expert e multiplies by e + 1


class Layer(NamedTuple):
    """One layer's input on every data rank."""

    deals: list[Deal]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    u: list[torch.Tensor]


@st.composite
def layers(draw: st.DrawFn) -> Layer:
    num_data, num_ranks = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    per_rank, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 7))
    experts = num_ranks * per_rank
    top_k = draw(st.integers(1, experts))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    # Few favourites, so that some experts and ranks have nothing.
    favour = torch.rand(experts, generator=generator) * draw(st.sampled_from([0.0, 10.0]))
    deal = Deal(num_ranks, per_rank, draw(st.sampled_from(["expert", "rank"])), 0, draw(st.booleans()))
    scores = [favour + torch.rand(tokens, experts, generator=generator) for _ in range(num_data)]
    return Layer(
        [replace(deal, data_rank=i) for i in range(num_data)],
        [score.topk(top_k, dim=1).indices for score in scores],
        [torch.rand(tokens, top_k, generator=generator) for _ in range(num_data)],
        [torch.randn(tokens, HIDDEN, generator=generator) for _ in range(num_data)],
    )


def messages(layer: Layer, routes: list[Route], i: int) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Rows, pairs' rows and pairs' weights from data rank i to every expert rank."""
    one = routes[i]
    rows = split(layer.u[i][one.rows.token_index[: one.rows.row_counts.sum()]], one.counts[:, 0].tolist())
    sizes = one.counts[:, 1:].sum(dim=1).tolist()
    weights = all_weights(layer.weights[i], layer.deals[i])[one.order]
    return list(zip(rows, split(one.pair_row, sizes), split(weights, sizes), strict=True))


def assigned_to(layer: Layer, i: int, rank: int) -> list[tuple[int, int, int]]:
    """(slot, token, column of the weights or -1) of data rank i's assignments to an expert rank, by slot."""
    deal, ids = layer.deals[i], layer.ids[i].tolist()
    found = [
        (expert % deal.experts_per_rank, token, column)
        for token, chosen in enumerate(ids)
        for column, expert in enumerate(chosen)
        if expert // deal.experts_per_rank == rank
    ]
    if deal.shared:
        tokens = range(len(ids))
        found += [(deal.experts_per_rank, t, -1) for t in tokens if (i * len(ids) + t) % deal.num_ranks == rank]
    return sorted(found, key=lambda one: one[0])


@given(layers())
@settings(max_examples=60)
def test_messages_hold_what_a_loop_over_tokens_finds(layer: Layer) -> None:
    routes = [route(ids, deal) for ids, deal in zip(layer.ids, layer.deals, strict=True)]
    for i, one in enumerate(routes):
        deal = layer.deals[i]
        for rank, (rows, pair_row, weights) in enumerate(messages(layer, routes, i)):
            expected = assigned_to(layer, i, rank)
            tokens = [token for _, token, _ in expected]
            assert len(rows) == (len(expected) if deal.copies == "expert" else len(set(tokens)))
            assert torch.equal(rows[pair_row.long()], layer.u[i][tokens])
            wanted = [1.0 if column < 0 else layer.weights[i][token, column].item() for _, token, column in expected]
            assert weights.tolist() == wanted
            slots = [slot for slot, _, _ in expected]
            assert one.counts[rank, 1:].tolist() == [slots.count(slot) for slot in range(deal.num_slots)]


@given(layers())
@settings(max_examples=60)
def test_outputs_and_gradients_come_back_to_their_tokens(layer: Layer) -> None:
    routes = [route(ids, deal) for ids, deal in zip(layer.ids, layer.deals, strict=True)]
    grads = [torch.randn(u.shape, generator=torch.Generator().manual_seed(5)) for u in layer.u]
    outputs: list[list[torch.Tensor]] = [[] for _ in layer.u]
    row_grads: list[list[torch.Tensor]] = [[] for _ in layer.u]
    pair_grads: list[list[torch.Tensor]] = [[] for _ in layer.u]
    for rank in range(layer.deals[0].num_ranks):
        received = [messages(layer, routes, i)[rank] for i in range(len(layer.u))]
        inbound = Inbound(torch.stack([one.counts[rank] for one in routes]).numpy())
        rows = torch.cat([one[0] for one in received])
        pairs = [torch.stack((pair_row, weights.view(torch.int32)), dim=1) for _, pair_row, weights in received]
        permutation, row_index, weights = inbound.merge(torch.cat(pairs))
        factors = expert_factors(layer.deals[0], rank, inbound.slot_counts)
        y = torch.zeros_like(rows).index_add_(0, row_index, (weights * factors)[:, None] * rows[row_index])
        g = torch.cat([gradient_rows(grads[i], routes[i], rank) for i in range(len(layer.u))])
        du = torch.zeros_like(rows).index_add_(0, row_index, (weights * factors)[:, None] * g[row_index])
        dw = (g[row_index] * rows[row_index]).sum(dim=1) * factors
        unsorted = torch.empty_like(dw).index_copy_(0, permutation, dw)
        for i in range(len(layer.u)):
            outputs[i].append(split(y, inbound.rows_from)[i])
            row_grads[i].append(split(du, inbound.rows_from)[i])
            pair_grads[i].append(split(unsorted, inbound.pairs_from)[i])
    for i, one in enumerate(routes):
        expected, expected_du, expected_dw = dense(layer, i, grads[i])
        index = row_map(layer.ids[i], layer.deals[i])
        assert torch.allclose(add_rows(layer.u[i], torch.cat(outputs[i]), index), layer.u[i] + expected, rtol=1e-5)
        du = add_rows(None, torch.cat(row_grads[i]), one.rows)
        assert torch.allclose(du, expected_du, rtol=1e-4, atol=1e-4)
        dw = weight_gradients(torch.cat(pair_grads[i]), one.order, *layer.ids[i].shape)
        assert torch.allclose(dw, expected_dw, rtol=1e-4, atol=1e-4)


def expert_factors(deal: Deal, rank: int, slot_counts: list[int]) -> torch.Tensor:
    first = rank * deal.experts_per_rank
    factors = [first + slot + 1.0 for slot in range(deal.experts_per_rank)] + [SHARED_FACTOR] * deal.shared
    return torch.tensor(factors).repeat_interleave(torch.tensor(slot_counts))


def gradient_rows(grad: torch.Tensor, one: Route, rank: int) -> torch.Tensor:
    sizes = one.counts[:, 0].tolist()
    return split(grad[one.rows.token_index[: sum(sizes)]], sizes)[rank]


def dense(layer: Layer, i: int, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sum of the experts' outputs, and the gradients of u and of the weights, token by token."""
    u, ids, weights = layer.u[i], layer.ids[i], layer.weights[i]
    y, du, dw = torch.zeros_like(u), torch.zeros_like(u), torch.zeros_like(weights)
    for token in range(len(u)):
        for column in range(ids.shape[1]):
            factor = ids[token, column].item() + 1.0
            y[token] += weights[token, column] * factor * u[token]
            du[token] += weights[token, column] * factor * grad[token]
            dw[token, column] = factor * (u[token] * grad[token]).sum()
        if layer.deals[i].shared:
            y[token] += SHARED_FACTOR * u[token]
            du[token] += SHARED_FACTOR * grad[token]
    return y, du, dw


@given(st.integers(1, 4), st.integers(1, 9), st.integers(1, 5))
def test_shared_experts_are_dealt_evenly(num_data: int, tokens: int, num_ranks: int) -> None:
    total = torch.zeros(num_ranks, dtype=torch.int64)
    for i in range(num_data):
        deal = Deal(num_ranks, 1, "rank", i, shared=True)
        shared = route(torch.zeros(tokens, 1, dtype=torch.int64), deal).counts[:, -1]
        assert shared.max() - shared.min() <= 1
        total += shared
    assert total.sum() == num_data * tokens
    assert total.max() - total.min() <= 1


@given(layers())
@settings(max_examples=30)
def test_who_adds_up_needs_only_the_ids(layer: Layer) -> None:
    for ids, deal in zip(layer.ids, layer.deals, strict=True):
        whole, alone = route(ids, deal).rows, row_map(ids.int(), deal)
        assert torch.equal(whole.row_counts, alone.row_counts)
        num_rows = int(whole.row_counts.sum())
        assert torch.equal(whole.token_index[:num_rows], alone.token_index[:num_rows])
        assert torch.equal(whole.places, alone.places)


@given(layers())
@settings(max_examples=60)
def test_a_token_knows_the_places_of_its_rows(layer: Layer) -> None:
    for ids, deal in zip(layer.ids, layer.deals, strict=True):
        rows = route(ids, deal).rows
        tokens = rows.token_index[: rows.row_counts.sum()].tolist()
        expected = [[place for place, token in enumerate(tokens) if token == t] for t in range(len(ids))]
        assert [sorted(place for place in places if place >= 0) for places in rows.places.tolist()] == expected


def test_rows_are_summed_in_fp32() -> None:
    one, small = torch.ones(1, HIDDEN, dtype=torch.bfloat16), torch.full((256, HIDDEN), 2.0**-9, dtype=torch.bfloat16)
    where = torch.arange(256, dtype=torch.int32)
    total = add_rows(one, small, RowMap(torch.zeros(256, dtype=torch.int64), torch.tensor([256]), where[None]))
    assert total.dtype == torch.bfloat16
    assert torch.equal(total, torch.full_like(one, 1.5))
