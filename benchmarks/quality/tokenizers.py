"""Drafts of a tokenizer that is not the target's: accept length and tokens a second over plain steps, and how often the
draft is right by the way in which it reads the tokens that it lacks.

    python -m benchmarks.quality.tokenizers --model FOLDER [--draft FOLDER] [--workloads code_completion code_editing]
        [--prompts 5] [--new-tokens 128] [--repeats 2] [--as-chat] [--readings] [--no-compile] [--json FILE]

Greedy, one prompt at a time. All systems answer each prompt in turn, in one process; a rate is the median over the
repeats. Ours draft in every round, but for the last. "HF assistant" is transformers' own loop with `tokenizer` and
`assistant_tokenizer`.

--readings: the share of the target's tokens, in its own answers after the prompts, that are the likeliest common token
of the draft after the same text. spec_compile reads the "longest end": each token is one of the draft's. The others are
"first part" (of the token's text in the draft's tokenizer), "mean of parts" (of their embeddings), "all parts" (each is
a token of its own) and "text anew" (the whole text is tokenized again after every token).
"""

import argparse
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel

import spec_compile
from benchmarks.common import (
    DEMO_MODEL,
    PLAIN,
    PROMPTS,
    RESULTS,
    answer_in_turn,
    device_for,
    load_model,
    prompts_of,
    save_rows,
    show,
    stamp,
)
from spec_compile.contrib.two_tokenizers import CommonTokens

JOINED = dict(num_steps=3, topk=3, num_draft_tokens=16, ngram=True)
OURS = {
    PLAIN: ("ngram", dict(num_draft_tokens=1)),
    "n-grams": ("ngram", dict(num_draft_tokens=16, adaptive=False)),
    "chain": ("draft_model", dict(num_steps=3, adaptive=False)),
    "tree": ("draft_model", dict(num_steps=3, topk=3, num_draft_tokens=12, adaptive=False)),
    "tree with n-grams": ("draft_model", dict(**JOINED, adaptive=False)),
    "tree with n-grams, adaptive": ("draft_model", JOINED),
}
"""Name -> algorithm and its options."""
HF = "HF assistant"
READINGS = "longest end", "first part", "mean of parts", "all parts", "text anew"


def wrap(model: PreTrainedModel, draft: PreTrainedModel, tokenizers: tuple, **more) -> dict:
    """Our systems by name. tokenizers: the target's and the draft's. more: options that all of them get."""
    pair = dict(draft=draft, tokenizer=tokenizers[0], assistant_tokenizer=tokenizers[1])
    return {
        name: spec_compile.speculate(model, algo, **(pair if algo == "draft_model" else {}), **options, **more)
        for name, (algo, options) in OURS.items()
    }


def measure(
    model: PreTrainedModel, draft: PreTrainedModel, tokenizers: tuple, ours: dict, prompts: list[Tensor],
    new_tokens: int, repeats: int,
) -> tuple[list[Tensor], list[dict]]:  # fmt: skip
    """The answers of plain steps, and a row for each system."""
    fixed = dict(max_new_tokens=new_tokens, eos_token_id=None, pad_token_id=0, do_sample=False)
    names = dict(assistant_model=draft, tokenizer=tokenizers[0], assistant_tokenizer=tokenizers[1])
    systems = {name: partial(fast.generate, **fixed) for name, fast in ours.items()}
    systems[HF] = partial(model.generate, **fixed, **names)
    answers, rates = answer_in_turn(systems, ours, prompts, repeats)
    rows = []
    for name, rate in rates.items():
        same = sum(one.equal(other) for one, other in zip(answers[name], answers[PLAIN]))
        row = {"system": name, "tokens_per_s": rate, "over_plain": rate / rates[PLAIN], "identical": same}
        rows.append(row | {"accept_length": ours[name].speculation.stats.accept_length if name in ours else None})
    return answers[PLAIN], rows


@torch.no_grad()
def reading_shares(
    draft: PreTrainedModel, tokenizers: tuple, mapping: CommonTokens, prompts: list[Tensor], answers: list[Tensor]
) -> dict[str, float]:
    """The share of the answers' tokens that the draft finds likeliest, by the way of reading; see the module.

    prompts: [1, n] each. answers: [m] each.
    """
    ours, theirs = tokenizers
    right, count = dict.fromkeys(READINGS, 0), sum(map(len, answers))
    embed = draft.get_input_embeddings()

    def likeliest(rows=slice(None), **inputs) -> Tensor:
        return mapping.draft_to_target[mapping.logits(draft(**inputs).logits[0, rows]).argmax(-1)]

    def anew(text: Tensor) -> Tensor:
        ids = theirs(ours.decode(text), return_tensors="pt").input_ids
        return likeliest(-1, input_ids=ids.to(text.device))

    for prompt, answer in zip(prompts, answers):
        text = torch.cat([prompt[0], answer])
        before = slice(prompt.shape[1] - 1, len(text) - 1)  # the rows that draft the answer
        parts = [_parts(token, ours, theirs, mapping) for token in text.tolist()]
        ends = torch.tensor([len(each) for each in parts]).cumsum(0).to(text.device) - 1
        first, joined = text.new_tensor([each[0] for each in parts]), text.new_tensor([i for p in parts for i in p])
        mean = torch.stack([embed(text.new_tensor(each)).mean(dim=0) for each in parts])
        drafts = {
            "longest end": likeliest(before, input_ids=mapping.read(text)[None]),
            "first part": likeliest(before, input_ids=first[None]),
            "mean of parts": likeliest(before, inputs_embeds=mean[None]),
            "all parts": likeliest(ends[before], input_ids=joined[None]),
            "text anew": torch.stack([anew(text[:end]) for end in range(prompt.shape[1], len(text))]),
        }
        for name, tokens in drafts.items():
            right[name] += int((tokens == answer).sum())
    return {name: each / count for name, each in right.items()}


def _parts(token: int, ours, theirs, mapping: CommonTokens) -> list[int]:
    """The draft's tokens of a token of the target: its counterpart, or its text's; without a text, what is read."""
    read = int(mapping.read(mapping.target_to_draft.new_tensor(token)))
    if bool((mapping.draft_to_target == token).any()):
        return [read]
    return theirs(ours.decode([token]), add_special_tokens=False).input_ids or [read]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the folder of the target and its tokenizer")
    parser.add_argument("--draft", default=str(DEMO_MODEL), help="that of the draft (default: the demo model)")
    parser.add_argument("--workloads", nargs="+", default=["code_completion", "code_editing"])
    parser.add_argument("--prompts", type=int, default=5, help="first prompts of each workload")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--as-chat", action="store_true", help="put prompts into the model's chat template")
    parser.add_argument("--readings", action="store_true", help="measure the ways of reading, too")
    parser.add_argument("--no-compile", action="store_true", help="rounds without Inductor")
    parser.add_argument("--json", type=Path, default=RESULTS / "tokenizers.json")
    options = parser.parse_args(arguments)
    device = device_for(options.threads)
    model = load_model(options.model, device)
    draft = load_model(options.draft, device).to(model.dtype)
    tokenizers = tuple(AutoTokenizer.from_pretrained(folder) for folder in (options.model, options.draft))
    ours = wrap(model, draft, tokenizers, compile=not options.no_compile, check=False, cache=False)
    for fast in ours.values():
        fast.speculation.warmup()
    mapping = ours["chain"].speculation.engine.runtime.algorithm.mapping
    names = dict(device=device, model=Path(options.model).name, draft=Path(options.draft).name)
    for workload in options.workloads:
        prompts = prompts_of(workload, PROMPTS, options.prompts, tokenizers[0], 600, options.as_chat)
        prompts = [ids.to(device) for ids in prompts]
        sizes = options.new_tokens, options.repeats
        answers, rows = measure(model, draft, tokenizers, ours, prompts, *sizes)
        cells = [[f"{v:.2f}" if isinstance(v, float) else str(v or "") for v in row.values()] for row in rows]
        show(rows[0], cells, workload)
        if options.readings:
            shares = reading_shares(draft, tokenizers, mapping, prompts, answers)
            print(", ".join(f"{name} {share:.1%}" for name, share in shares.items()), flush=True)
            rows.append({"system": "readings"} | shares)
        common = torch.cat([mapping.draft_to_target == token for token in torch.cat(answers).unsqueeze(1)])
        share = float(common.sum() / sum(map(len, answers)))
        print(f"{share:.1%} of the answers' tokens are in both vocabularies", flush=True)
        rows = [names | {"workload": workload, "common": share, "as_chat": options.as_chat} | row for row in rows]
        keys = "device", "model", "draft", "workload", "as_chat", "system"
        save_rows(options.json, rows, keys, stamp(model.device))


if __name__ == "__main__":
    main()
