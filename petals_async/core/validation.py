"""A server's checks of what a client sent: shape, unit and limit are in every message.

Everything raised here is the caller's fault (RequestError): never retried, and no server is excluded for it.
"""

from __future__ import annotations

from petals_async.core.hidden import TensorSpec
from petals_async.core.messages import SESSION_ID_BYTES, OpenSession, Step
from petals_async.core.server_info import ServerInfo
from petals_async.errors import LengthExceededError, RequestError

MAX_SHOWN = 16
"""A message quotes at most this many of a peer's numbers: it may have sent millions."""


def check_open(message: OpenSession, server: ServerInfo) -> None:
    """Check the opening of a session against what the server is.

    Raises:
        RequestError: WRONG_MODEL, BAD_SPAN, BAD_DTYPE, BAD_ADAPTER, BAD_SHAPE or BAD_REQUEST.
        LengthExceededError: More tokens than a session may have.
    """
    limits = server.limits
    if len(message.session_id) != SESSION_ID_BYTES:
        raise RequestError(f"a session id is {SESSION_ID_BYTES} random bytes, got {len(message.session_id)} bytes")
    if message.model_fingerprint != server.model_fingerprint:
        raise RequestError(
            f"{server} serves {server.model} ({server.model_fingerprint[:12]}), "
            f"not the model with fingerprint {message.model_fingerprint[:12]!r}",
            reason="WRONG_MODEL",
        )
    if message.span not in server.span:
        raise RequestError(f"{server} holds blocks {server.span}, not {message.span}", reason="BAD_SPAN")
    if message.wire_dtype != server.dtype:
        raise RequestError(f"{server} computes in {server.dtype}, not {message.wire_dtype}", reason="BAD_DTYPE")
    if message.adapter:
        raise RequestError(f"{server} has no adapter {message.adapter[:64]!r}", reason="BAD_ADAPTER")
    if not 1 <= message.batch_size <= limits.max_batch_size:
        raise RequestError(
            f"batch size must be 1 to {limits.max_batch_size}, got {message.batch_size}", reason="BAD_SHAPE"
        )
    if not 1 <= message.max_tokens <= limits.max_session_tokens:
        raise LengthExceededError(
            f"a session has 1 to {limits.max_session_tokens} tokens, {message.max_tokens} were asked for"
        )


def check_step(step: Step, *, session: OpenSession, server: ServerInfo) -> None:
    """Check a step's header, and its bytes if they are inline, before anything is allocated for it.

    Raises:
        RequestError: BAD_SHAPE, BAD_DTYPE, BAD_ROWS or BAD_REQUEST.
        LengthExceededError: Beyond the step's or the session's limit.
    """
    _check_length(step, session, server)
    _check_rows(step, session)
    _check_chunks(step)
    if step.num_outputs is not None and not 0 <= step.num_outputs <= step.num_tokens:
        raise RequestError(f"{step.num_outputs} outputs of {step.num_tokens} tokens were asked for")
    if step.num_tokens == 0:
        if step.tensor is not None:
            raise RequestError("a step of zero tokens carries no hidden states", reason="BAD_SHAPE")
        return
    _check_tensor(step, session, server)


def _check_length(step: Step, session: OpenSession, server: ServerInfo) -> None:
    limit = server.limits.max_step_tokens
    if step.token_offset < 0 or step.num_tokens < 0:
        raise RequestError(f"{step.num_tokens} tokens at offset {step.token_offset} can't be")
    if step.num_tokens > limit:
        raise LengthExceededError(f"a step has at most {limit} tokens, got {step.num_tokens}")
    end = step.token_offset + step.num_tokens
    if end > session.max_tokens:
        raise LengthExceededError(f"the session was opened for {session.max_tokens} tokens, this step ends at {end}")


def _check_rows(step: Step, session: OpenSession) -> None:
    rows = step.row_indices
    if not rows:
        return
    if len(rows) != session.batch_size or not 0 <= min(rows) <= max(rows) < session.batch_size:
        raise RequestError(
            f"row_indices must be {session.batch_size} numbers below {session.batch_size}, "
            f"got {len(rows)}: {list(rows[:MAX_SHOWN])}",
            reason="BAD_ROWS",
        )
    if step.num_tokens == 0:
        raise RequestError("a step that permutes rows needs at least one token", reason="BAD_ROWS")


def _check_chunks(step: Step) -> None:
    chunks = step.chunk_tokens
    if chunks and (min(chunks) < 1 or sum(chunks) != step.num_tokens):
        raise RequestError(
            f"chunk_tokens must be positive and sum up to {step.num_tokens}, got {len(chunks)} that sum up to "
            f"{sum(chunks)}: {list(chunks[:MAX_SHOWN])}",
            reason="BAD_SHAPE",
        )


def _check_tensor(step: Step, session: OpenSession, server: ServerInfo) -> None:
    expected = TensorSpec(session.wire_dtype, (session.batch_size, step.num_tokens, server.hidden_size))
    if step.tensor is None:
        raise RequestError(f"{step.num_tokens} tokens without hidden states", reason="BAD_SHAPE")
    if step.tensor.dtype != expected.dtype:
        raise RequestError(f"hidden states must be {expected.dtype}, got {step.tensor.dtype}", reason="BAD_DTYPE")
    if step.tensor.shape != expected.shape:
        raise RequestError(
            f"hidden states must have the shape (batch, tokens, hidden_size) = {expected.shape}, "
            f"got {step.tensor.shape[:MAX_SHOWN]}",
            reason="BAD_SHAPE",
        )
    if step.data is not None and len(step.data) != expected.num_bytes:
        raise RequestError(
            f"{expected.dtype} {expected.shape} is {expected.num_bytes} bytes, got {len(step.data)}",
            reason="BAD_SHAPE",
        )
