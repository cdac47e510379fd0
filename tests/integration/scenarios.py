"""What the kill matrix generates, and the same in plain transformers, whole, in a process of its own."""

import torch

NEW_TOKENS = 12
"""New tokens of each prompt."""

CHUNK_TOKENS = 8
"""Longest step: the long prompt is sent in three chunks."""

PROMPTS = ([65 + 3 * n % 26 for n in range(20)], [97 + 5 * n % 26 for n in range(9)], [72, 105, 33])
"""One long prompt, and two shorter ones."""

ROWS = (PROMPTS[0], [97 + 7 * n % 26 for n in range(20)])
"""The prompts of two rows that share their positions."""

PERMUTATIONS = {3: (1, 0), 7: (1, 1), 9: (1, 0)}
"""With which new token the rows go on from which others."""

SEED = 7
SAMPLING = {"do_sample": True, "temperature": 0.8, "top_k": 20, "top_p": 1.0}


def options_of(decoding):
    """Return `generate`'s options, but for the seed."""
    return {"max_new_tokens": NEW_TOKENS, **(SAMPLING if decoding == "sampling" else {"do_sample": False})}


def decode_rows(decoding):
    """Decode two rows with permutations: yield (new tokens of each row, row_indices), take logits (2, V).

    A row goes on from the history of the row that `row_indices` names, and from its own last token. Returns what
    was picked for each row.
    """
    generator = torch.Generator().manual_seed(SEED)
    texts, new = [[] for _ in ROWS], [list(row) for row in ROWS]
    for index in range(NEW_TOKENS):
        rows = PERMUTATIONS.get(index, ())
        logits = yield new, rows
        new = [[pick(row_logits, decoding, generator)] for row_logits in logits]
        for text, tokens in zip(texts, new, strict=True):
            text.extend(tokens)
    return texts


def pick(logits, decoding, generator):
    if decoding == "sampling":
        return int(torch.multinomial((logits.float() / 0.8).softmax(-1), 1, generator=generator))
    return int(logits.argmax())


# -- plain transformers


def plain_references(model_path, pipe):
    """Be a child process: send {(what, decoding): tokens} of the whole model in float32."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    found = {}
    for decoding in ("greedy", "sampling"):
        many = [plain_tokens(model, prompt, decoding) for prompt in PROMPTS]
        found["one", decoding], found["many", decoding] = many[:1], many
        found["rows", decoding] = plain_rows(model, decoding)
    pipe.send(found)


def plain_tokens(model, prompt, decoding):
    """Continue a prompt with transformers' own `generate`, whose draws come from the global generator."""
    torch.manual_seed(SEED)
    inputs = torch.tensor([prompt])
    output = model.generate(inputs, attention_mask=torch.ones_like(inputs), pad_token_id=258, **options_of(decoding))
    return output[0, len(prompt) :].tolist()


def plain_rows(model, decoding):
    """Decode the two rows without any cache: the whole history again for each token."""
    decoder = decode_rows(decoding)
    history = [[] for _ in ROWS]
    new, rows = next(decoder)
    try:
        while True:
            if rows:
                history = [list(history[row]) for row in rows]
            for text, tokens in zip(history, new, strict=True):
                text.extend(tokens)
            with torch.no_grad():
                logits = model(torch.tensor(history)).logits[:, -1]
            new, rows = decoder.send(logits)
    except StopIteration as end:
        return end.value


def plain_greedy(model_path, prompt, count, pipe):
    """Be a child process: send the greedy continuation of one prompt."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    inputs = torch.tensor([prompt])
    output = model.generate(
        inputs, attention_mask=torch.ones_like(inputs), pad_token_id=258, max_new_tokens=count, do_sample=False
    )
    pipe.send(output[0, len(prompt) :].tolist())


def in_child(context, function, *args):
    """Return what a function sends into the pipe that it gets as its last argument, in a process of its own."""
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=function, args=(*args, theirs))
    process.start()
    theirs.close()
    try:
        return ours.recv()
    finally:
        process.join(20)
        process.kill()
        ours.close()
