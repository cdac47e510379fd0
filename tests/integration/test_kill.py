"""A server is killed in the middle, and the tokens are those of plain transformers."""

import pytest
import torch

import petals_async

pytestmark = pytest.mark.processes


def plain_tokens(model_path, prompt, count):
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_path)
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()


async def test_a_killed_server_changes_no_token(process_swarm, tiny_model):
    prompt, count = [10, 20, 30, 40, 50], 30
    async with (
        process_swarm(tiny_model, first="0:2", middle="2:4", last="4:6", spare="1:5") as swarm,
        petals_async.Client(tiny_model, swarm.registry.address) as client,
        client.session(max_tokens=64) as session,
    ):
        tokens, new = [], prompt
        while len(tokens) < count:
            if len(tokens) == 12:
                lost = next(server.name for span, server in session.route if 2 in span)
                await swarm.kill(lost)
            states = client.files.edges.embed(new, position=session.position)
            outputs = await session.step(states, num_outputs=1)
            new = [int(client.files.edges.logits(outputs)[0, -1].argmax())]
            tokens += new
        assert len(session.recoveries) == 1
        assert session.recoveries[0].at == len(prompt) + 11
    assert tokens == plain_tokens(tiny_model, prompt, count)
