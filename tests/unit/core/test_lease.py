"""Leases, revisions, and what a watcher can resume from."""

import dataclasses
import math

import pytest
from server_records import MODEL, OTHER_MODEL, make_server

from petals_async.core.lease import MAX_BLOCKS, LeaseTable, ServerPut, ServerRemoved, WatchCursor
from petals_async.core.server_info import ServerState
from petals_async.core.span import Span
from petals_async.errors import RegistryUnavailableError, RequestError


def make_table(**options):
    return LeaseTable("instance", **options)


def at(revision, instance_id="instance"):
    return WatchCursor(instance_id, revision)


def test_a_lease_runs_out_at_its_time_and_not_before():
    table = make_table()
    table.grant(make_server("a"), 10.0, 100.0)
    assert table.next_expiry() == 110.0
    assert table.expire(109.999) == []
    assert table.expire(110.0) == ["a"]
    assert (table.servers(), table.next_expiry()) == ([], None)


def test_a_renewal_extends_by_the_time_to_live():
    table = make_table()
    table.grant(make_server("a"), 10.0, 0.0)
    assert table.renew("a", 9.0)
    assert table.next_expiry() == 19.0
    assert not table.renew("unknown", 9.0)


def test_what_has_run_out_cannot_be_renewed_even_if_it_was_not_swept():
    table = make_table()
    table.grant(make_server("a"), 10.0, 0.0)
    assert not table.renew("a", 10.0)
    table.grant(make_server("a"), 10.0, 10.0)
    assert table.renew("a", 11.0)


def test_the_first_to_run_out_is_removed_first():
    table = make_table()
    for server_id, ttl_s in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        table.grant(make_server(server_id), ttl_s, 0.0)
    assert table.expire(5.0) == ["b", "c", "a"]


def test_changes_are_counted_and_equal_records_are_none():
    table = make_table()
    assert table.revision == 1
    table.grant(make_server("a"), 10.0, 0.0)
    table.grant(make_server("a"), 10.0, 1.0)
    assert table.revision == 2
    changed = make_server("a", state=ServerState.DRAINING)
    table.grant(changed, 10.0, 2.0)
    assert table.revoke("a")
    assert not table.revoke("a")
    assert table.events_since(at(2)) == [ServerPut(at(3), changed), ServerRemoved(at(4), "a")]


@pytest.mark.parametrize("cursor", [at(2, "another"), at(0), at(-1), at(9)])
def test_a_cursor_that_means_nothing_here_needs_a_snapshot(cursor):
    table = make_table()
    table.grant(make_server("a"), 10.0, 0.0)
    assert table.events_since(cursor) is None


def test_a_cursor_older_than_the_history_needs_a_snapshot():
    table = make_table(history_events=2)
    for number in range(4):
        table.grant(make_server(f"s{number}"), 10.0, 0.0)
    assert table.events_since(at(2)) is None
    assert [event.server.server_id for event in table.events_since(at(3))] == ["s2", "s3"]
    assert table.events_since(at(5)) == []


def test_models_are_kept_apart():
    table = make_table()
    ours, theirs = make_server("a"), make_server("b", model_fingerprint=OTHER_MODEL)
    table.grant(ours, 10.0, 0.0)
    table.grant(theirs, 10.0, 0.0)
    assert (table.servers(MODEL), table.servers(OTHER_MODEL)) == ([ours], [theirs])
    assert table.servers() == [ours, theirs]
    assert table.snapshot(MODEL).servers == (ours,)
    assert table.events_since(at(1), OTHER_MODEL) == [ServerPut(at(3), theirs)]


def test_an_id_cannot_change_its_model():
    table = make_table()
    table.grant(make_server("a"), 10.0, 0.0)
    with pytest.raises(RequestError, match="another model") as caught:
        table.grant(make_server("a", model_fingerprint=OTHER_MODEL), 10.0, 0.0)
    assert caught.value.reason == "WRONG_MODEL"


def test_listings_go_by_block_then_name():
    table = make_table()
    for server_id, blocks, name in (("1", "5:9", "b"), ("2", "0:4", "z"), ("3", "5:9", "a")):
        table.grant(make_server(server_id, blocks, name=name), 10.0, 0.0)
    assert [server.server_id for server in table.servers()] == ["2", "3", "1"]


def test_a_full_registry_takes_no_more_but_keeps_what_it_has():
    table = make_table(max_servers=1)
    table.grant(make_server("a"), 10.0, 0.0)
    with pytest.raises(RegistryUnavailableError, match="it holds 1 servers") as caught:
        table.grant(make_server("b"), 10.0, 0.0)
    assert caught.value.reason == "REGISTRY_FULL"
    table.grant(make_server("a", state=ServerState.DRAINING), 10.0, 0.0)
    assert len(table) == 1


@pytest.mark.parametrize("ttl_s", [0.99, 300.1, 0.0, -1.0, math.nan, math.inf])
def test_times_to_live_are_bounded(ttl_s):
    with pytest.raises(RequestError, match="a lease lives 1 to 300 s"):
        make_table().grant(make_server("a"), ttl_s, 0.0)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"server_id": ""}, "can't be empty"),
        ({"address": ""}, "can't be empty"),
        ({"model_fingerprint": ""}, "can't be empty"),
        ({"name": "x" * 1025}, "more than 1024 characters"),
        ({"block_digests": ("x" * 129,) * 4}, "more than 128 characters"),
        ({"block_digests": ("x",)}, "1 digests for 4 blocks"),
        ({"num_blocks": 3}, "span 0:4 of 3 blocks"),
        ({"num_blocks": MAX_BLOCKS + 1}, "blocks"),
        ({"kv_free_tokens": -1}, "a size below 0"),
        ({"block_step_s": math.nan}, "nan s for a block"),
    ],
)
def test_records_are_checked(fields, said):
    table = make_table()
    with pytest.raises(RequestError, match=said):
        table.grant(dataclasses.replace(make_server("a"), **fields), 10.0, 0.0)
    assert (len(table), table.revision) == (0, 1)


def test_a_record_without_digests_is_sound():
    table = make_table()
    table.grant(make_server("a", block_digests=()), 1.0, 0.0)
    assert table.servers()[0].span == Span(0, 4)
