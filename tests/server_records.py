"""Block servers' records for tests of the planner and the registries."""

from petals_async.core.server_info import ServerInfo, ServerState
from petals_async.core.span import Span

MODEL = "fingerprint-1"
OTHER_MODEL = "fingerprint-2"


def make_server(server_id, blocks="0:4", **fields):
    """Return a serving server's record; one digest for each block, the same for all servers."""
    span = Span.parse(blocks)
    known = {
        "name": server_id,
        "address": f"{server_id}.test:1",
        "version": "0.1.0",
        "model": "tiny",
        "model_fingerprint": MODEL,
        "num_blocks": 30,
        "hidden_size": 16,
        "dtype": "float32",
        "state": ServerState.SERVING,
        "block_digests": tuple(f"digest-{block}" for block in range(span.start, span.end)),
    }
    return ServerInfo(server_id=server_id, span=span, **(known | fields))
