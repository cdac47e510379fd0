"""The planner against brute force over all covers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_records import make_server

from petals_async.core.route import HOP_OVERHEAD_S, KV_PENALTY_S, Candidate, plan_route, uncovered
from petals_async.core.server_info import ServerState
from petals_async.core.span import Span
from petals_async.errors import NoRouteError

NUM_BLOCKS = 6
KV_TOKENS = 10
milliseconds = st.integers(0, 50).map(lambda number: number / 1000)


@st.composite
def spans(draw):
    start = draw(st.integers(0, NUM_BLOCKS - 1))
    return Span(start, draw(st.integers(start + 1, NUM_BLOCKS)))


@st.composite
def candidates(draw, server_id):
    """Return a server of which some blocks may have other weights, or none stated."""
    span = draw(spans())
    digests = tuple(draw(st.sampled_from(["good", "good", "bad", ""])) for _ in range(len(span)))
    capacity = draw(st.sampled_from([0, 5, 20]))
    server = make_server(
        server_id,
        str(span),
        state=draw(st.sampled_from([ServerState.SERVING] * 3 + [ServerState.DRAINING])),
        block_digests=digests,
        kv_capacity_tokens=capacity,
        kv_free_tokens=draw(st.integers(0, capacity)),
    )
    return Candidate(server, draw(milliseconds), draw(milliseconds))


@st.composite
def problems(draw):
    servers = [draw(candidates(f"s{number}")) for number in range(draw(st.integers(0, 5)))]
    excluded = draw(st.sets(st.sampled_from(["s0", "s1", "s2"]), max_size=1))
    known = draw(st.sets(st.integers(0, NUM_BLOCKS - 1)))
    return draw(spans()), servers, excluded, dict.fromkeys(known, "good")


def can_run(candidate, block, span, excluded, expected):
    server = candidate.server
    if server.state is not ServerState.SERVING or server.server_id in excluded or block not in server.span:
        return False
    if server.kv_capacity_tokens and not room(candidate, span, server.kv_capacity_tokens):
        return False
    return block not in expected or server.block_digests[block - server.span.start] == expected[block]


def room(candidate, span, tokens):
    held = candidate.server.span
    return KV_TOKENS * len(held.overlap(span)) <= tokens * len(held)


def leg_cost_s(candidate, blocks, span):
    server = candidate.server
    short = server.kv_capacity_tokens > 0 and not room(candidate, span, server.kv_free_tokens)
    return candidate.rtt_s + HOP_OVERHEAD_S + KV_PENALTY_S * short + blocks * candidate.block_step_s


def cheapest(block, span, servers, excluded, expected):
    """Return the cost of the cheapest of all covers of `[block, span.end)`, or None if there is none."""
    if block == span.end:
        return 0.0
    costs = []
    for candidate in servers:
        end = block
        while end < span.end and can_run(candidate, end, span, excluded, expected):
            end += 1
            rest = cheapest(end, span, servers, excluded, expected)
            if rest is not None:
                costs.append(leg_cost_s(candidate, end - block, span) + rest)
    return min(costs, default=None)


def disagree(span, servers, expected):
    for block in range(span.start, span.end):
        held = {
            c.server.block_digests[block - c.server.span.start]
            for c in servers
            if c.server.state is ServerState.SERVING and block in c.server.span and block not in expected
        }
        if len(held - {""}) > 1:
            return True
    return False


@given(problems())
def test_the_route_is_an_exact_cover_of_least_cost(problem):
    span, servers, excluded, expected = problem
    least = cheapest(span.start, span, servers, excluded, expected)
    options = {"kv_tokens": KV_TOKENS, "excluded": excluded, "lost_digests": expected}
    gaps = uncovered(span, servers, **options)
    assert bool(gaps) == (least is None)
    if least is None or disagree(span, servers, expected):
        with pytest.raises(NoRouteError) as caught:
            plan_route(span, servers, **options)
        assert all(str(gap) in str(caught.value) for gap in gaps) or caught.value.reason == "CONFLICTING_WEIGHTS"
        return
    legs = plan_route(span, servers, **options)
    by_id = {c.server.server_id: c for c in servers}
    assert [block for leg in legs for block in range(leg.span.start, leg.span.end)] == list(range(span.start, span.end))
    for leg in legs:
        for block in range(leg.span.start, leg.span.end):
            assert can_run(by_id[leg.server.server_id], block, span, excluded, expected)
    cost_s = sum(leg_cost_s(by_id[leg.server.server_id], len(leg.span), span) for leg in legs)
    assert cost_s == pytest.approx(least, abs=1e-6)


@given(problems(), st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(problem, random):
    span, servers, excluded, expected = problem
    shuffled = list(servers)
    random.shuffle(shuffled)
    assert outcome(span, servers, excluded, expected) == outcome(span, shuffled, excluded, expected)


def outcome(span, servers, excluded, expected):
    try:
        return plan_route(span, servers, excluded=excluded, lost_digests=expected)
    except NoRouteError as error:
        return str(error)
