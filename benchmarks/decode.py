"""Decoding through two servers, against plain transformers' `generate` in one process, with the same threads.

The demo model; one thread for each server, for the client's edges and for transformers. All are alive in one run and
take turns, so that the machine's drift hits both alike. Only one of the processes computes at a time: a token goes
through them one after the other.

    python -m benchmarks.decode         # prints JSON
"""

from __future__ import annotations

import argparse
import time
from contextlib import AsyncExitStack
from typing import Any

import petals_async
from benchmarks.children import child, start_servers
from benchmarks.report import Report, spread
from petals_async.loop import run

PROMPT = "The three most important things about distributed systems are"
SPANS = ("0:15", "15:30")


def plain(pipe: Any, dtype: str) -> None:
    """Be plain transformers: answer each (tokens) with (ids, seconds)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from petals_async.models.demo import demo_path

    torch.set_num_threads(1)
    path = demo_path()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
    ids = AutoTokenizer.from_pretrained(path)(PROMPT, return_tensors="pt").input_ids
    pipe.send("ready")
    while True:
        count = pipe.recv()
        started_at = time.perf_counter()
        out = model.generate(ids, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        pipe.send((out[0, ids.shape[1] :].tolist(), time.perf_counter() - started_at))


async def ours(client: petals_async.Client, count: int) -> tuple[list[int], float]:
    started_at = time.perf_counter()
    result = await client.generate(PROMPT, max_new_tokens=count, min_new_tokens=count, do_sample=False)
    return list(result.token_ids), time.perf_counter() - started_at


async def measure(dtype: str, rounds: int, tokens: int, report: Report) -> None:
    async with AsyncExitStack() as stack:
        reference = await stack.enter_async_context(child(plain, dtype))
        registry = await stack.enter_async_context(petals_async.Registry("127.0.0.1:0"))
        await start_servers(stack, registry.address, "demo", SPANS, dtype=dtype)
        client = await stack.enter_async_context(petals_async.Client("demo", registry.address, threads=1))
        plain_rates, our_rates, equal = [], [], True
        for turn in range(rounds + 1):
            expected, plain_s = await reference.ask(tokens)
            got, our_s = await ours(client, tokens)
            equal = equal and got == expected
            if turn:
                plain_rates.append(tokens / plain_s)
                our_rates.append(tokens / our_s)
    report.add(f"plain transformers, {dtype}", {"tokens_per_s": spread(plain_rates)})
    report.add(f"two servers, {dtype}", {"tokens_per_s": spread(our_rates), "same_tokens": equal})
    report.ratio(f"two servers / plain, {dtype}", our_rates, plain_rates, 1, limit=0.95, at_least=True)


async def main(rounds: int, tokens: int) -> None:
    report = Report("decode", {"rounds": rounds, "tokens": tokens, "prompt": PROMPT, "spans": SPANS})
    for dtype in ("float32", "bfloat16"):
        await measure(dtype, rounds, tokens, report)
    report.print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9, help="counted rounds")
    parser.add_argument("--tokens", type=int, default=48, help="new tokens a round")
    arguments = parser.parse_args()
    run(main, arguments.rounds, arguments.tokens)
