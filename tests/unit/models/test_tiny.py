"""The tiny model is fit for tests of others: its texts vary, its best tokens lead, its tokenizer loses nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from petals_async.models.checkpoint import Checkpoint
from petals_async.testing.tiny import make_tiny_llama


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("blocks", [2, 4, 12])
def test_greedy_texts_vary_and_best_tokens_lead(tmp_path: Path, seed: int, blocks: int) -> None:
    path = make_tiny_llama(tmp_path, seed=seed, num_blocks=blocks)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    for prompt in ("Once upon a time", "The capital of France is"):
        token_ids = torch.tensor([tokenizer(prompt)["input_ids"]])
        found = model.generate(
            token_ids, max_new_tokens=24, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
        new = found.sequences[0, token_ids.shape[1] :].tolist()
        assert len(new) == 24
        assert len(set(new)) > 8
        gaps = torch.cat(found.logits).topk(2).values.diff().abs()
        assert gaps.min() > 1e-3


def test_the_tokenizer_loses_nothing(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make_tiny_llama(tmp_path))
    for text in ("plain", "  two  spaces\n", "héllo 世界 🙂", "".join(map(chr, range(1, 300)))):
        token_ids = tokenizer(text)["input_ids"]
        assert token_ids == list(text.encode())
        assert tokenizer.decode(token_ids) == text
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>"
    assert tokenizer(text)["input_ids"][:2] == [259, ord("B")]
    assert tokenizer.eos_token_id == 257
    assert Checkpoint.open(tmp_path).eos_token_ids == (257,)


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    one, two, other = (make_tiny_llama(tmp_path / str(n), seed=n // 2) for n in (0, 1, 2))
    files = [(path / "model.safetensors").read_bytes() for path in (one, two, other)]
    assert files[0] == files[1] != files[2]


def test_sizes_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for wrong in ({"vocab_size": 200}, {"hidden_size": 30}):
        with pytest.raises(ValueError, match="need"):
            make_tiny_llama(tmp_path, **wrong)  # type: ignore[arg-type]
