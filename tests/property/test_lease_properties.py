"""LeaseTable against a dictionary of deadlines; and watchers that resume against the full picture."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from server_records import MODEL, OTHER_MODEL, make_server

from petals_async.core.lease import LeaseTable, ServerPut
from petals_async.errors import RegistryUnavailableError

MAX_SERVERS = 4
HISTORY_EVENTS = 3
ids = st.sampled_from(["a", "b", "c", "d", "e", "f"])


def record(server_id, version):
    return make_server(server_id, version=version, model_fingerprint=MODEL if server_id < "d" else OTHER_MODEL)


class Leases(RuleBasedStateMachine):
    """`held` is id -> (record, time to live, deadline); `views` is what each watcher has pieced together."""

    def __init__(self):
        super().__init__()
        self.table = LeaseTable("i", max_servers=MAX_SERVERS, history_events=HISTORY_EVENTS)
        self.now = 0.0
        self.held = {}
        self.views = {model: (self.table.cursor, {}) for model in (None, MODEL, OTHER_MODEL)}

    @rule(server_id=ids, ttl_s=st.sampled_from([1.0, 2.5, 10.0]), version=st.sampled_from(["1", "2"]))
    def grant(self, server_id, ttl_s, version):
        server = record(server_id, version)
        if server_id not in self.held and len(self.held) == MAX_SERVERS:
            try:
                self.table.grant(server, ttl_s, self.now)
            except RegistryUnavailableError:
                return
            raise AssertionError("a full table took another server")
        self.table.grant(server, ttl_s, self.now)
        self.held[server_id] = (server, ttl_s, self.now + ttl_s)

    @rule(server_id=ids)
    def renew(self, server_id):
        server, ttl_s, deadline = self.held.get(server_id, (None, 0.0, -1.0))
        alive = self.now < deadline
        assert self.table.renew(server_id, self.now) == alive
        if alive:
            self.held[server_id] = (server, ttl_s, self.now + ttl_s)

    @rule(server_id=ids)
    def revoke(self, server_id):
        assert self.table.revoke(server_id) == (self.held.pop(server_id, None) is not None)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 3.0]))
    def wait(self, seconds):
        self.now += seconds

    @rule()
    def expire(self):
        over = {server_id for server_id, (_, _, deadline) in self.held.items() if deadline <= self.now}
        assert set(self.table.expire(self.now)) == over
        for server_id in over:
            del self.held[server_id]

    @rule(model=st.sampled_from([None, MODEL, OTHER_MODEL]))
    def watch(self, model):
        cursor, view = self.views[model]
        missed = self.table.revision - cursor.revision
        events = self.table.events_since(cursor, model)
        assert (events is None) == (missed > HISTORY_EVENTS)
        if events is None:
            view = {server.server_id: server for server in self.table.snapshot(model).servers}
        for event in events or ():
            if isinstance(event, ServerPut):
                view[event.server.server_id] = event.server
            else:
                view.pop(event.server_id, None)
        self.views[model] = (self.table.cursor, view)
        assert view == {s.server_id: s for s in self.table.servers(model)}

    @invariant()
    def same_servers(self):
        assert {s.server_id: s for s in self.table.servers()} == {i: held[0] for i, held in self.held.items()}
        assert self.table.next_expiry() == min((deadline for _, _, deadline in self.held.values()), default=None)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40)
