"""The torch backend: sub-spans, wanted outputs, and failures that leave the cache as it was."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from petals_async.abc import BackendOutcome, BackendResult, BackendStep
from petals_async.core.hidden import HiddenStates
from petals_async.core.span import Span
from petals_async.engine.backend import TorchBackend
from petals_async.engine.kv import KvCache
from petals_async.errors import ComputeError, LengthExceededError, RequestError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.codec import from_hidden, to_hidden
from petals_async.models.span import BlockSpan
from petals_async.testing.tiny import make_tiny_llama

SPAN = Span(1, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(make_tiny_llama(tmp_path_factory.mktemp("tiny")))


@pytest.fixture
def backend(checkpoint: Checkpoint) -> TorchBackend:
    return TorchBackend(BlockSpan.load(checkpoint, 0, 4))


def states(tokens: int, *, rows: int = 2, seed: int = 0, dtype: str = "float32") -> HiddenStates:
    generator = torch.Generator().manual_seed(seed)
    return to_hidden(torch.randn(rows, tokens, 64, generator=generator).to(getattr(torch, dtype)))


def run(backend: TorchBackend, step: BackendStep) -> BackendOutcome:
    (outcome,) = backend.run([step])
    return outcome


def outputs(backend: TorchBackend, step: BackendStep) -> HiddenStates:
    outcome = run(backend, step)
    assert isinstance(outcome, BackendResult), outcome
    assert outcome.outputs is not None
    return outcome.outputs


def snapshot(cache: KvCache) -> list[torch.Tensor]:
    """All that counts in a cache."""
    return [part[:, :, : layer.length].clone() for layer in cache.held for part in (layer.keys, layer.values)]


def assert_untouched(cache: KvCache, before: list[torch.Tensor]) -> None:
    after = snapshot(cache)
    assert len({layer.length for layer in cache.held}) == 1
    assert all(torch.equal(left, right) for left, right in zip(before, after, strict=True))


def test_case_07_a_larger_span_runs_only_the_hole(checkpoint: Checkpoint, backend: TorchBackend) -> None:
    exact = TorchBackend(BlockSpan.load(checkpoint, 1, 3))
    hidden = states(6)
    found = outputs(backend, BackendStep(backend.allocate(SPAN, 2, 8), SPAN, 0, hidden))
    assert found == outputs(exact, BackendStep(exact.allocate(SPAN, 2, 8), SPAN, 0, hidden))
    assert backend.kv_bytes(SPAN, 2, 8) == exact.kv_bytes(SPAN, 2, 8)


def test_sessions_of_different_sub_spans_do_not_disturb_each_other(backend: TorchBackend) -> None:
    spans = [Span(0, 4), Span(0, 1), Span(2, 4)]
    alone = []
    for span in spans:
        cache = backend.allocate(span, 2, 8)
        alone.append([outputs(backend, BackendStep(cache, span, n, states(1, seed=n))) for n in range(4)])
    caches = [backend.allocate(span, 2, 8) for span in spans]
    for n in range(4):
        steps = [BackendStep(cache, span, n, states(1, seed=n)) for cache, span in zip(caches, spans, strict=True)]
        for outcome, wanted in zip(backend.run(steps), alone, strict=True):
            assert isinstance(outcome, BackendResult)
            assert outcome.outputs == wanted[n]


@pytest.mark.parametrize(("wanted", "kept"), [(None, 5), (0, 0), (1, 1), (3, 3), (9, 5)])
def test_only_the_wanted_outputs_come_back(backend: TorchBackend, wanted: int | None, kept: int) -> None:
    everything = outputs(backend, BackendStep(backend.allocate(SPAN, 2, 8), SPAN, 0, states(5)))
    step = BackendStep(backend.allocate(SPAN, 2, 8), SPAN, 0, states(5), num_outputs=wanted)
    outcome = run(backend, step)
    assert isinstance(outcome, BackendResult)
    assert outcome.outputs == (everything.slice_tokens(5 - kept, 5) if kept else None)
    assert outcome.compute_s > 0
    assert step.cache.length == 5


def test_zero_tokens_truncate_and_permute(backend: TorchBackend) -> None:
    cache = backend.allocate(SPAN, 2, 8)
    outputs(backend, BackendStep(cache, SPAN, 0, states(6)))
    rows_before = snapshot(cache)
    outcome = run(backend, BackendStep(cache, SPAN, 4, None, row_indices=(1, 1)))
    assert isinstance(outcome, BackendResult)
    assert outcome.outputs is None
    assert cache.length == 4
    for left, right in zip(snapshot(cache), rows_before, strict=True):
        assert torch.equal(left, right[[1, 1], :, :4])
    empty = HiddenStates("float32", (2, 0, 64), b"")
    assert isinstance(run(backend, BackendStep(cache, SPAN, 0, empty)), BackendResult)
    assert cache.length == 0


def wrong_numbers(step: BackendStep) -> BackendStep:
    hidden = from_hidden(states(2))
    hidden[1, 1, 7] = float("nan")
    return replace(step, hidden=to_hidden(hidden))


WRONG: dict[str, tuple[Callable[[BackendStep], BackendStep], str]] = {
    "offset_gap": (lambda step: replace(step, token_offset=7), "OFFSET_GAP"),
    "negative_offset": (lambda step: replace(step, token_offset=-1), "OFFSET_GAP"),
    "width": (lambda step: replace(step, hidden=HiddenStates("float32", (2, 1, 63), bytes(504))), "BAD_SHAPE"),
    "rows": (lambda step: replace(step, hidden=states(2, rows=3)), "BAD_SHAPE"),
    "dtype": (lambda step: replace(step, hidden=states(2, dtype="bfloat16")), "BAD_DTYPE"),
    "row_indices": (lambda step: replace(step, row_indices=(0, 2)), "BAD_ROWS"),
    "too_few_row_indices": (lambda step: replace(step, row_indices=(0,)), "BAD_ROWS"),
    "span": (lambda step: replace(step, span=Span(0, 3)), "BAD_SPAN"),
    "length": (lambda step: replace(step, hidden=states(20)), "LENGTH_EXCEEDED"),
    "not_finite": (wrong_numbers, "NON_FINITE_INPUT"),
}


@pytest.mark.parametrize("case", WRONG)
def test_case_10_the_callers_faults_change_nothing(backend: TorchBackend, case: str) -> None:
    change, reason = WRONG[case]
    cache = backend.allocate(SPAN, 2, 16)
    outputs(backend, BackendStep(cache, SPAN, 0, states(6)))
    before = snapshot(cache)
    outcome = run(backend, change(BackendStep(cache, SPAN, 3, states(2), row_indices=(1, 0))))
    assert isinstance(outcome, RequestError)
    assert outcome.reason == reason
    assert isinstance(outcome, LengthExceededError) == (case == "length")
    assert_untouched(cache, before)


def raise_out_of_memory(*_args: object) -> None:
    raise torch.OutOfMemoryError("no memory left")


def give_nan(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output * float("nan")


def give_infinity(_module: object, _inputs: object, output: torch.Tensor) -> torch.Tensor:
    return output * torch.tensor(3e38) * 1e30


@pytest.mark.parametrize(
    ("fault", "reason"),
    [(raise_out_of_memory, "COMPUTE_FAILED"), (give_nan, "NON_FINITE"), (give_infinity, "NON_FINITE")],
)
@pytest.mark.parametrize("row_indices", [(), (1, 0)])
@pytest.mark.parametrize("offset", [2, 6])
def test_case_62_a_failure_in_the_second_block_puts_all_layers_back(
    backend: TorchBackend,
    fault: Callable[..., torch.Tensor | None],
    reason: str,
    row_indices: tuple[int, ...],
    offset: int,
) -> None:
    cache = backend.allocate(SPAN, 2, 16)
    outputs(backend, BackendStep(cache, SPAN, 0, states(6)))
    before = snapshot(cache)
    step = BackendStep(cache, SPAN, offset, states(3, seed=5), row_indices=row_indices)
    hook = backend.blocks._blocks.get_submodule("2").register_forward_hook(fault)
    outcome = run(backend, step)
    hook.remove()
    assert isinstance(outcome, ComputeError)
    assert outcome.reason == reason
    assert "1:3" in str(outcome)
    assert_untouched(cache, before)
    # and the step can be run again as if nothing had happened
    fresh = backend.allocate(SPAN, 2, 16)
    outputs(backend, BackendStep(fresh, SPAN, 0, states(6)))
    assert outputs(backend, step) == outputs(backend, replace(step, cache=fresh))


def test_one_failed_step_does_not_touch_the_others(backend: TorchBackend) -> None:
    good, bad = backend.allocate(SPAN, 2, 8), backend.allocate(SPAN, 2, 8)
    outcomes = backend.run(
        [BackendStep(bad, SPAN, 3, states(1)), BackendStep(good, SPAN, 0, states(1)), BackendStep(bad, SPAN, 0, None)]
    )
    assert [type(outcome) for outcome in outcomes] == [RequestError, BackendResult, BackendResult]


def test_an_own_bug_is_not_hidden_but_the_cache_is_whole(backend: TorchBackend) -> None:
    cache = backend.allocate(SPAN, 2, 8)
    outputs(backend, BackendStep(cache, SPAN, 0, states(4)))
    before = snapshot(cache)

    def bug(*_args: object) -> None:
        raise KeyError("bug")

    backend.blocks._blocks.get_submodule("2").register_forward_hook(bug)
    with pytest.raises(KeyError):
        backend.run([BackendStep(cache, SPAN, 1, states(1))])
    assert_untouched(cache, before)


def test_memory_that_is_not_there_is_a_compute_error(backend: TorchBackend) -> None:
    with pytest.raises(ComputeError, match="bytes of KV cache"):
        backend.allocate(SPAN, 1_000_000, 1_000_000)
    for span in (Span(3, 5), Span(4, 5)):
        with pytest.raises(RequestError):
            backend.allocate(span, 1, 1)


def test_a_fork_goes_on_like_its_source(backend: TorchBackend) -> None:
    source, target = backend.allocate(SPAN, 2, 16), backend.allocate(SPAN, 2, 12)
    outputs(backend, BackendStep(source, SPAN, 0, states(6)))
    backend.copy_prefix(source, target, 4)
    step = BackendStep(source, SPAN, 4, states(2, seed=3))
    assert outputs(backend, replace(step, cache=target)) == outputs(backend, step)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_case_36_no_graph_is_kept_and_every_dtype_runs(checkpoint: Checkpoint, dtype: str) -> None:
    backend = TorchBackend(BlockSpan.load(checkpoint, 0, 2, dtype=dtype))
    span = Span(0, 2)
    cache = backend.allocate(span, 2, 8)
    with torch.enable_grad():
        found = outputs(backend, BackendStep(cache, span, 0, states(4, dtype=dtype)))
    assert (found.dtype, found.shape) == (dtype, (2, 4, 64))
    assert all(not part.requires_grad for layer in cache.held for part in (layer.keys, layer.values))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_token_has_the_same_bits_alone_in_company_and_in_a_replay(checkpoint: Checkpoint, dtype: str) -> None:
    """A prompt of 11 and 300 decoded tokens: outputs, keys and values, bit by bit."""
    backend = TorchBackend(BlockSpan.load(checkpoint, 0, 4, dtype=dtype))
    assert backend.blocks.exact
    chunks = (11, *[1] * 300)
    hidden = states(sum(chunks), rows=1, dtype=dtype)
    offsets = [sum(chunks[:index]) for index in range(len(chunks))]
    parts = [hidden.slice_tokens(offset, offset + size) for offset, size in zip(offsets, chunks, strict=True)]
    alone, company, replay = (backend.allocate(SPAN, 1, 320) for _ in range(3))
    for offset, part in zip(offsets, parts, strict=True):
        expected = outputs(backend, BackendStep(alone, SPAN, offset, part))
        others = [
            BackendStep(backend.allocate(SPAN, 2, 40), SPAN, 0, states(1 + (offset + index) % 40, dtype=dtype))
            for index in range(offset % 17)
        ]
        found = backend.run([*others, BackendStep(company, SPAN, offset, part)])[-1]
        assert isinstance(found, BackendResult)
        assert found.outputs == expected, offset
    merged = outputs(backend, BackendStep(replay, SPAN, 0, hidden, chunk_tokens=chunks, num_outputs=1))
    assert merged == expected
    for other in (company, replay):
        assert_untouched(other, snapshot(alone))


def test_a_step_that_fails_in_company_fails_alone(backend: TorchBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass stops in the middle of the blocks; the other session's outcome is as without the one that failed."""
    sound, broken, again = (BackendStep(backend.allocate(SPAN, 2, 8), SPAN, 0, states(3)) for _ in range(3))
    monkeypatch.setattr(broken.cache, "update", raise_out_of_memory)
    first, failed = backend.run([sound, broken])
    assert isinstance(failed, ComputeError)
    assert failed.reason == "COMPUTE_FAILED"
    assert broken.cache.length == 0
    assert isinstance(first, BackendResult)
    assert first.outputs == outputs(backend, again)
    assert_untouched(sound.cache, snapshot(again.cache))
