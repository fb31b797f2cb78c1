"""Rollouts: seconds of several sampled answers to each of many prompts, next to transformers' own loops.

    python -m benchmarks.rollouts [--model PATH] [--draft PATH --algo NAME] [--prompts 64] [--answers 4]
        [--new-tokens 128] [--epochs 3] [--requests N] [--rows 64] [--no-compile] [--json FILE]

Every system draws answers at temperature 1 from the whole vocabulary. All answers have the same length, because no
end-of-sequence token ends one, so all systems do the same work. The prompts come again in every epoch. N-grams, and a
head if there is one, start without texts; they keep the answers of earlier epochs. "HF generate_batch" is transformers'
continuous batching, "HF generate" its loop over batches of --rows padded rows. Each system runs once before, for a few
tokens. "over" divides the seconds of a baseline by those of the system.
"""

import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # so that the path of this file also runs it

import torch
from transformers import AutoTokenizer, GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

import spec_compile
from benchmarks import common

WORKLOADS = ("maths", "code_completion", "docstrings", "bug_fixing")
"""The sources of the prompts, in equal shares."""
BASELINES = ("HF generate_batch", "HF generate")
PAGE = 256
"""Tokens of a block of transformers' cache."""
CPU_BATCH_TOKENS = 256
"""Tokens that transformers processes at once on a CPU, where its default makes a mask of gigabytes."""


def config_of(new_tokens: int, answers: int) -> GenerationConfig:
    """Sampling at temperature 1, to a fixed length."""
    return GenerationConfig(
        max_new_tokens=new_tokens, do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
        num_return_sequences=answers, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip


def ours(fast: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig, requests: int | None) -> dict:
    """Rows decoded, and tokens a round."""
    batching = ContinuousBatchingConfig(max_requests_per_batch=requests)
    outputs = fast.generate_batch(prompts, config, batching, eos_token_id=-1).values()
    steps = sum(output.speculation.steps for output in outputs)
    tokens = sum(len(output.generated_tokens) for output in outputs)
    return {"tokens": tokens, "accept length": tokens / steps}


def batched(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig) -> dict:
    """transformers' continuous batching, with a cache that has room for all requests."""
    rows = [ids for ids in prompts for _ in range(config.num_return_sequences)]
    single = GenerationConfig.from_dict(config.to_dict() | {"num_return_sequences": 1})
    settings = {}
    if model.device.type == "cpu":
        blocks = sum(-(-(len(ids) + config.max_new_tokens) // PAGE) for ids in rows)
        settings = {"num_blocks": blocks, "max_batch_tokens": CPU_BATCH_TOKENS}
    outputs = model.generate_batch(rows, single, ContinuousBatchingConfig(**settings), progress_bar=False)
    return {"tokens": sum(len(output.generated_tokens) for output in outputs.values())}


def padded(model: PreTrainedModel, prompts: list[list[int]], config: GenerationConfig, rows: int) -> dict:
    """transformers' loop over batches of at most `rows` rows, padded on the left."""
    tokens, step = 0, max(1, rows // config.num_return_sequences)
    for begin in range(0, len(prompts), step):
        part = prompts[begin : begin + step]
        width = max(map(len, part))
        ids = torch.tensor([[0] * (width - len(each)) + each for each in part], device=model.device)
        mask = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in part], device=model.device)
        output = model.generate(ids, attention_mask=mask, generation_config=config)
        tokens += output[:, width:].numel()
    return {"tokens": tokens}


def measure(model: PreTrainedModel, prompts: list[list[int]], options) -> list[dict]:
    """A row for each system and epoch."""
    config = config_of(options.new_tokens, options.answers)
    short = config_of(4, options.answers)
    rows = []
    model.generation_config.eos_token_id = None

    def run(system: str, epoch: int, answer) -> None:
        row, seconds = common.elapsed(partial(answer, prompts, config), model.device)
        row |= {"system": system, "epoch": epoch, "seconds": seconds, "tokens_per_s": row["tokens"] / seconds}
        rows.append(row)
        print(f"{system}, epoch {epoch}: {seconds:.2f} s, {row['tokens_per_s']:.0f} tokens/s", flush=True)

    drafts = {"n-grams": dict(algo="ngram")}
    if options.draft is not None:
        drafts[f"{options.algo} and n-grams"] = dict(algo=options.algo, draft=options.draft, ngram=True)
    for name, draft in drafts.items():
        fast = spec_compile.speculate(model, **draft, compile=not options.no_compile, check=False, cache=False)
        answer = partial(ours, fast, requests=options.requests)
        answer(prompts, short)
        fast.speculation.ngram.reset()
        for epoch in range(1, options.epochs + 1):
            run(name, epoch, answer)
        del fast, answer
    for name, answer in zip(BASELINES, (partial(batched, model), partial(padded, model, rows=options.rows))):
        if name not in options.without:
            answer(prompts[:1], short)
            run(name, 1, answer)
    return rows


def with_ratios(rows: list[dict]) -> list[dict]:
    """Add the tokens a second of each row over those of each baseline.

    10 tokens a second of a baseline and 25 of a row give the row {"over HF generate": 2.5}.
    """
    rates = {row["system"]: row["tokens_per_s"] for row in rows if row["system"] in BASELINES}
    return [row | {f"over {name}": row["tokens_per_s"] / rate for name, rate in rates.items()} for row in rows]


def main(arguments: list[str] | None = None) -> None:
    parser = common.command_line(__doc__, results="rollouts.json", threads=2)
    parser.add_argument("--model", type=Path, default=common.DEMO_MODEL)
    parser.add_argument("--draft", type=Path, help="a head for this model")
    parser.add_argument("--algo", default="eagle3", help="of the head")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="the GPU if there is one")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt at most")
    parser.add_argument("--answers", type=int, default=4, help="to each prompt")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--requests", type=int, help="that decode at once with ours; left out, as many as it chooses")
    parser.add_argument("--rows", type=int, default=64, help="of a batch of HF generate")
    parser.add_argument("--without", nargs="*", choices=BASELINES, default=[], help="baselines that do not run")
    parser.add_argument("--no-compile", action="store_true", help="rounds without Inductor")
    options = parser.parse_args(arguments)
    device = options.device or common.device_for(options.threads)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    share = -(-options.prompts // len(WORKLOADS))
    sources = [common.prompts_of(name, common.PROMPTS, share, tokenizer, options.context) for name in WORKLOADS]
    prompts = [ids[0].tolist() for group in zip(*sources) for ids in group][: options.prompts]
    model = common.load_model(options.model, device)
    torch.manual_seed(0)
    facts = common.stamp(model.device)
    size = {name: getattr(options, name) for name in ("prompts", "answers", "new_tokens")}
    shared = {"device": device, "model": options.model.name, **size}
    rows = [shared | row for row in with_ratios(measure(model, prompts, options))]
    columns = ["system", "epoch", "seconds", "tokens_per_s", "accept length", *(f"over {name}" for name in BASELINES)]
    title = f"{len(prompts)} prompts, {options.answers} answers each, {options.new_tokens} tokens"
    common.show_rows(rows, columns, title)
    common.save_rows(options.json, rows, ("device", "model", *size, "system", "epoch"), facts)


if __name__ == "__main__":
    main()
