"""The planner's rules, one by one; `property/test_route_properties.py` has the cost against brute force."""

import math

import pytest
from server_records import OTHER_MODEL, make_server

from petals_async.core.route import (
    HOP_OVERHEAD_S,
    MAX_LISTED,
    Candidate,
    conflicting_holders,
    plan_route,
    uncovered,
)
from petals_async.core.server_info import ServerState
from petals_async.core.span import Span
from petals_async.errors import NoRouteError


def candidate(server_id, blocks="0:4", *, rtt_s=0.01, block_step_s=0.001, free=None, **fields):
    return Candidate(make_server(server_id, blocks, **fields), rtt_s, block_step_s, free)


def planned(blocks, *candidates, **options):
    return [(leg.server.server_id, str(leg.span)) for leg in plan_route(Span.parse(blocks), candidates, **options)]


def test_one_server_that_holds_all_is_preferred_to_several():
    parts = [candidate("a", "0:10"), candidate("b", "10:20"), candidate("c", "20:30")]
    assert planned("0:30", *parts, candidate("whole", "0:30")) == [("whole", "0:30")]


def test_further_servers_are_used_when_they_earn_their_hop():
    slow = candidate("whole", "0:30", block_step_s=0.1)
    assert planned("0:30", slow, candidate("a", "0:15"), candidate("b", "15:30")) == [("a", "0:15"), ("b", "15:30")]


def test_a_hop_costs_its_round_trip_and_the_overhead():
    gain_s = 0.01 + HOP_OVERHEAD_S
    slow = candidate("a", "0:2", block_step_s=0.001 + gain_s)
    assert planned("0:2", slow, candidate("b", "1:2", block_step_s=0.001001)) == [("a", "0:2")]
    assert planned("0:2", slow, candidate("b", "1:2", block_step_s=0.000999)) == [("a", "0:1"), ("b", "1:2")]


def test_legs_are_clipped_to_the_hole():
    assert planned("8:14", candidate("a", "6:24")) == [("a", "8:14")]


def test_only_serving_servers_that_are_not_excluded():
    busy = [
        candidate("joining", state=ServerState.JOINING),
        candidate("leaving", state=ServerState.DRAINING),
        candidate("dead"),
    ]
    with pytest.raises(NoRouteError) as caught:
        planned("0:4", *busy, excluded={"dead"})
    for said in ("dead (dead) at dead.test:1: excluded", "it is joining", "it is draining"):
        assert said in str(caught.value)
    assert planned("0:4", *busy, candidate("zz"), excluded=["dead"]) == [("zz", "0:4")]


def test_no_route_names_exactly_the_uncovered_blocks():
    with pytest.raises(NoRouteError, match=r"no server for blocks 0:2, 5:6, 9:12 of 0:12$") as caught:
        planned("0:12", candidate("a", "2:5"), candidate("b", "6:9"))
    assert caught.value.reason == "NO_ROUTE"


def test_uncovered_blocks_as_spans():
    found = [candidate("a", "2:5"), candidate("b", "6:9"), candidate("c", "0:12", state=ServerState.JOINING)]
    assert uncovered(Span(0, 12), found) == [Span(0, 2), Span(5, 6), Span(9, 12)]
    assert uncovered(Span(2, 5), found) == []
    assert uncovered(Span(2, 9), found, excluded={"b"}) == [Span(5, 9)]


def test_a_server_too_small_for_the_session_is_no_candidate():
    small = candidate("small", kv_capacity_tokens=99, kv_free_tokens=99)
    with pytest.raises(NoRouteError, match="its KV memory is 99 tokens, 100 are needed"):
        planned("0:4", small, kv_tokens=100)
    assert planned("0:4", small, kv_tokens=99) == [("small", "0:4")]


def test_a_server_short_of_free_memory_is_the_last_resort():
    full = candidate("full", kv_capacity_tokens=1000, kv_free_tokens=99)
    assert planned("0:4", full, kv_tokens=100) == [("full", "0:4")]
    far = candidate("far", rtt_s=5.0, kv_capacity_tokens=1000, kv_free_tokens=100)
    assert planned("0:4", full, far, kv_tokens=100) == [("far", "0:4")]


def test_free_memory_as_known_by_the_caller_wins_over_the_record():
    stale = candidate("a", kv_capacity_tokens=1000, kv_free_tokens=1000, free=0)
    other = candidate("b", rtt_s=1.0, kv_capacity_tokens=1000, kv_free_tokens=1000)
    assert planned("0:4", stale, other, kv_tokens=100) == [("b", "0:4")]


def test_memory_for_a_whole_span_is_more_for_a_part_of_it():
    wide = candidate("wide", "0:20", kv_capacity_tokens=100, kv_free_tokens=100)
    assert planned("4:14", wide, kv_tokens=200) == [("wide", "4:14")]
    assert uncovered(Span(4, 14), [wide], kv_tokens=201) == [Span(4, 14)]


def test_a_server_that_states_no_capacity_is_not_judged():
    assert planned("0:4", candidate("a"), kv_tokens=10**9) == [("a", "0:4")]


def test_holders_that_disagree_are_both_named_with_the_block():
    ours = candidate("ours", "0:4")
    theirs = candidate("theirs", "2:6", block_digests=("digest-2", "other-3", "digest-4", "digest-5"))
    with pytest.raises(NoRouteError, match=r"block 3: ours .* holds digest-3, theirs .* holds other-3") as caught:
        planned("0:6", ours, theirs)
    assert caught.value.reason == "CONFLICTING_WEIGHTS"


def test_a_conflict_outside_the_span_or_with_one_that_is_not_serving_is_no_matter():
    ours = candidate("ours", "0:4")
    theirs = candidate("theirs", "3:6", block_digests=("other-3", "digest-4", "digest-5"))
    assert planned("4:6", ours, theirs) == [("theirs", "4:6")]
    joining = candidate("joining", "0:4", block_digests=("x",) * 4, state=ServerState.JOINING)
    assert planned("0:4", ours, joining) == [("ours", "0:4")]


def test_a_conflict_with_an_excluded_holder_still_counts():
    wrong = candidate("wrong", block_digests=("x",) * 4)
    with pytest.raises(NoRouteError, match="different weights"):
        planned("0:4", candidate("ours"), wrong, excluded={"wrong"})


def test_a_known_digest_settles_who_is_right():
    right, wrong = candidate("right"), candidate("a-wrong", block_digests=("x",) * 4)
    expected = {block: f"digest-{block}" for block in range(4)}
    assert planned("0:4", right, wrong, lost_digests=expected) == [("right", "0:4")]


def test_a_replacement_with_other_weights_is_refused_and_the_error_says_so():
    wrong = candidate("wrong", "0:4", block_digests=("digest-0", "digest-1", "other-2", "digest-3"))
    expected = {block: f"digest-{block}" for block in range(4)}
    with pytest.raises(NoRouteError, match=r"blocks 2:3 of 0:4; not wrong .* of block 2 are other-2, wanted are"):
        planned("0:4", wrong, lost_digests=expected)


def test_a_replacement_that_states_no_digest_cannot_be_checked():
    with pytest.raises(NoRouteError, match="of block 1 are unknown, wanted are digest-1"):
        planned("0:4", candidate("a", block_digests=()), lost_digests={1: "digest-1"})
    assert planned("0:4", candidate("a", block_digests=()), lost_digests={1: ""}) == [("a", "0:4")]


def test_matching_blocks_around_one_with_other_weights_are_used():
    most = candidate("most", "0:3", block_digests=("digest-0", "other-1", "digest-2"))
    one = candidate("one", "1:2", rtt_s=1.0)
    legs = planned("0:3", most, one, lost_digests={1: "digest-1"})
    assert legs == [("most", "0:1"), ("one", "1:2"), ("most", "2:3")]


def test_ties_go_to_fewer_legs_then_to_the_lower_id():
    same = [candidate("b"), candidate("a"), candidate("c")]
    assert planned("0:4", *same) == planned("0:4", *reversed(same)) == [("a", "0:4")]
    free_hop = -HOP_OVERHEAD_S  # counts as the worst, not as a gift
    assert planned("0:4", candidate("a", rtt_s=free_hop), candidate("b", rtt_s=0.0)) == [("b", "0:4")]


@pytest.mark.parametrize("nonsense", [math.nan, math.inf, -1.0, 1e300])
def test_a_speed_that_cannot_be_counts_as_the_worst(nonsense):
    liar = Candidate(make_server("a", block_step_s=nonsense), 0.0)
    assert planned("0:4", liar, candidate("b", block_step_s=1.0)) == [("b", "0:4")]
    assert planned("0:4", liar) == [("a", "0:4")]


def test_what_was_measured_here_wins_over_the_servers_own_figure():
    boaster = Candidate(make_server("a", block_step_s=0.000001), 0.01, 0.5)
    honest = Candidate(make_server("b", block_step_s=0.001), 0.01)
    assert planned("0:4", boaster, honest) == [("b", "0:4")]


def test_conflicts_are_listed_once_for_each_pair_and_models_are_kept_apart():
    servers = [
        make_server("a"),
        make_server("b", block_digests=("x", "y", "z", "w")),
        make_server("c"),
        make_server("d", block_digests=("x", "y", "z", "w"), model_fingerprint=OTHER_MODEL),
        make_server("e", block_digests=()),
    ]
    assert [(c.block, c.first.server_id, c.second.server_id) for c in conflicting_holders(servers)] == [
        (0, "a", "b"),
        (0, "b", "c"),
    ]


def test_of_two_records_of_one_server_the_later_stands():
    older, newer = candidate("a", "0:8"), candidate("a", "0:4")
    assert uncovered(Span(0, 8), [older, newer]) == [Span(4, 8)]
    with pytest.raises(NoRouteError, match="blocks 4:8"):
        planned("0:8", older, newer)


def test_long_errors_are_bounded():
    wrong = [candidate(f"s{number:03}", state=ServerState.JOINING) for number in range(100)]
    with pytest.raises(NoRouteError) as caught:
        planned("0:4", *wrong)
    assert str(caught.value).endswith(f"; and {100 - MAX_LISTED} more")
