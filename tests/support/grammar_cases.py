"""Grammars over a table of logits: what plain constrained decoding gives, and what an acceptor accepts."""

import fake_xgrammar as fake
import models
import torch
from transformers import LogitsProcessorList
from transformers.generation import RepetitionPenaltyLogitsProcessor, TemperatureLogitsWarper, TopKLogitsWarper

from spec_compile.runtime.answer import Answer
from spec_compile.runtime.verify import Route, make_acceptor
from spec_compile.tree import Tree

VOCAB, EOS, NEW, NODES = 40, 2, 24, 8
TABLE = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(3))  # logits of the token after each token
TABLE[:, EOS] += 1
GRAMMARS = [fake.grammar(VOCAB, seed=seed, final={3, 7}) for seed in range(3)]


def plain(grammars, processors, ends=True):
    """The texts that transformers' greedy loop gives the rows of `grammars`."""
    ids, ended = torch.ones(len(grammars), 1, dtype=torch.int64), torch.zeros(len(grammars), dtype=torch.bool)
    processors = LogitsProcessorList([fake.Processor(list(grammars)), *processors])
    for _ in range(NEW):
        token = processors(ids, TABLE[ids[:, -1]]).argmax(dim=-1)
        ids = torch.cat([ids, torch.where(ended, 0, token)[:, None]], dim=1)
        ended |= (token == EOS) & ends
    return ids


def random_trees(answer, texts, g):
    """Trees below the last token of every row, of what follows in `texts`, of other tokens, and of unused nodes."""
    tokens, parents = torch.zeros(2, answer.batch, NODES, dtype=torch.int64)
    parents[:, 0] = -1
    for row, gained in enumerate(answer.rows):
        tokens[row, 0], depth, right = (gained or [1])[-1], [0] * NODES, [True] * NODES
        for node in range(1, NODES):
            parent = int(torch.randint(node, (), generator=g))
            rest, depth[node] = texts[row, len(gained) + 1 :], depth[parent] + 1
            siblings = tokens[row, 1:node][parents[row, 1:node] == parent].tolist()
            token = int(rest[depth[parent]]) if right[parent] and depth[parent] < len(rest) else 5
            right[node] = right[parent] and token not in siblings
            while token in siblings:
                token = (token + 1) % VOCAB
            tokens[row, node], parents[row, node] = token, parent
    return Tree(tokens, parents, torch.arange(NODES) < torch.randint(1, NODES + 1, (answer.batch, 1), generator=g))


def accepted(processors, batch, texts, seed=None, g=None, ends=True, new=NEW, device="cpu"):
    """What the acceptor of these processors gives, and the most tokens that a row gained in a round."""
    g = g or torch.Generator().manual_seed(0)
    answer = Answer(torch.ones(batch, 1, dtype=torch.int64), new + 1, [EOS] if ends else [], 0 if ends else None)
    accept, most = make_acceptor(Route.ON_HOST, answer, LogitsProcessorList(processors), seed), 0
    while not answer.done:
        tree, before = random_trees(answer, texts, g), [len(tokens) for tokens in answer.rows]
        on_device = Tree(*(part.to(device) for part in (tree.tokens, tree.parents, tree.real)))
        result = accept(on_device, TABLE[tree.tokens].to(device))
        for row, tokens in enumerate(answer.rows):
            gain = tokens[before[row] :]
            assert result.tokens[row, : len(gain)].tolist() == gain
            assert tree.tokens[row, result.path[row, 1 : len(gain)]].tolist() == gain[:-1]
            assert not gain or len(gain) == int(result.count[row])
            most = max(most, len(gain))
    return torch.nn.functional.pad(answer.sequences(), (0, new - answer.columns)), most, accept


def guesses_of(table):
    """Distributions [VOCAB, VOCAB] from which drafts are drawn, near those of a table of logits."""
    return (table + torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(5))).softmax(dim=1)


def drawn_chains(processors, rows, new, guesses, seed=7, ends=False, table=TABLE):
    """`new` tokens of each row from chains of four nodes that are drawn from `guesses` [VOCAB, VOCAB], the rounds that
    this took, and the acceptor."""
    answer = Answer(torch.ones(rows, 1, dtype=torch.int64), new + 1, [EOS] if ends else [], 0 if ends else None)
    accept, rounds = make_acceptor(Route.ON_HOST, answer, LogitsProcessorList(processors), seed), 0
    while not answer.done:
        chain = [torch.tensor([(gained or [1])[-1] for gained in answer.rows])]
        for _ in range(3):
            chain.append(guesses[chain[-1]].multinomial(1)[:, 0])
        tokens = torch.stack(chain, dim=1)
        real = torch.arange(4) < torch.randint(1, 5, (rows, 1))
        accept(Tree(tokens, torch.arange(-1, 3).expand(rows, -1), real, guesses[tokens]), table[tokens])
        rounds += 1
    return answer.sequences()[:, 1:], rounds, accept


WARPERS = {
    "temperature": [TemperatureLogitsWarper(0.7)],
    "top-k": [TemperatureLogitsWarper(2.0), TopKLogitsWarper(3)],
    "penalty": [RepetitionPenaltyLogitsProcessor(1.5)],
}

CALLS = {
    "one row": dict(grammar=0, rows=1),
    "a grammar a row": dict(grammar=[0, 1, 2], rows=3),
    "beyond the grammar's end": dict(grammar=0, rows=1, eos_token_id=None),
    "a shortest length": dict(grammar=[2, 0], rows=2, min_new_tokens=6),
    "a processor of the user's": dict(grammar=0, rows=2, logits_processor=[lambda ids, scores: scores * 0.5]),
    "scores": dict(grammar=0, rows=1, output_scores=True, return_dict_in_generate=True),
}


def call(model, grammar, rows, logits_processor=(), **options):
    grammars = [
        fake.grammar(model.config.vocab_size, seed=number, legal=20, states=4, final={1}, stop=EOS)
        for number in ([grammar] if isinstance(grammar, int) else grammar)
    ]
    ids, mask = (tensor[:rows].to(model.device) for tensor in models.prompts()[1:])
    processors = [fake.Processor(grammars), *logits_processor]
    options = dict(do_sample=False, max_new_tokens=32, eos_token_id=EOS, pad_token_id=0) | options
    output = model.generate(ids, attention_mask=mask, logits_processor=processors, **options)
    return getattr(output, "sequences", output)
