"""What stands for xgrammar in tests: its interface, over automata of token ids that are written by hand."""

import sys
import types
from dataclasses import dataclass

import torch
from transformers import LogitsProcessor


@dataclass
class TokenizerInfo:
    vocab_size: int


@dataclass
class CompiledGrammar:
    """edges: for each state, the states behind its legal tokens. final: states before which `stop` is legal."""

    edges: list[dict[int, int]]
    final: set[int]
    tokenizer_info: TokenizerInfo
    stop: int = 2


class GrammarMatcher:
    """Raises where xgrammar's would, and where it would only warn."""

    def __init__(self, grammar):
        self.grammar, self.states = grammar, [0]

    def is_terminated(self):
        return self.states[-1] is None

    def legal(self):
        assert not self.is_terminated()
        state = self.states[-1]
        return self.grammar.edges[state] | ({self.grammar.stop: None} if state in self.grammar.final else {})

    def accept_token(self, token):
        legal = self.legal()
        if token in legal:
            self.states.append(legal[token])
        return token in legal

    def rollback(self, count=1):
        assert count < len(self.states)
        del self.states[len(self.states) - count :]

    def fill_next_token_bitmask(self, bitmask, index=0):
        assert bitmask.dtype == torch.int32 and bitmask.device.type == "cpu" and bitmask.is_contiguous()
        bits = torch.zeros(32 * bitmask.shape[1], dtype=torch.int64)
        bits[list(self.legal())] = 1
        words = (bits.view(-1, 32) << torch.arange(32)).sum(dim=1)
        bitmask[index] = torch.where(words < 2**31, words, words - 2**32).to(torch.int32)
        return True


class Processor(LogitsProcessor):
    """xgrammar.contrib.hf.LogitsProcessor: accepts the last token of every row, then masks."""

    def __init__(self, compiled_grammar):
        self.compiled_grammars = compiled_grammar if isinstance(compiled_grammar, list) else [compiled_grammar]
        self.matchers, self.token_bitmask, self.prefilled, self.batch_size = [], None, False, 0

    def __call__(self, input_ids, scores):
        if not self.prefilled:
            self.compiled_grammars *= len(input_ids) // len(self.compiled_grammars)
            self.matchers = [GrammarMatcher(grammar) for grammar in self.compiled_grammars]
            self.token_bitmask = torch.zeros(len(input_ids), -(-scores.shape[1] // 32), dtype=torch.int32)
        for row, matcher in enumerate(self.matchers):
            if self.prefilled and not matcher.is_terminated():
                assert matcher.accept_token(int(input_ids[row, -1]))
            if not matcher.is_terminated():
                matcher.fill_next_token_bitmask(self.token_bitmask, row)
        self.prefilled = True
        legal = self.token_bitmask.to(scores.device)[:, :, None] >> torch.arange(32, device=scores.device) & 1
        return scores.masked_fill(legal.flatten(1)[:, : scores.shape[1]] == 0, -torch.inf)


Processor.__name__, Processor.__module__ = "LogitsProcessor", "xgrammar.contrib.hf"


def install(monkeypatch):
    """Make ``from xgrammar import GrammarMatcher`` give the one above."""
    module = types.ModuleType("xgrammar")
    module.GrammarMatcher = GrammarMatcher
    monkeypatch.setitem(sys.modules, "xgrammar", module)


def grammar(vocab, states=12, legal=4, seed=0, final=(), stop=2):
    """A random automaton in which `legal` tokens of `vocab` are legal in every state, never 0, 1 or the stop token."""
    g = torch.Generator().manual_seed(seed)
    tokens = [(torch.randperm(vocab - 3, generator=g)[:legal] + 3).tolist() for _ in range(states)]
    behind = torch.randint(states, (states, legal), generator=g).tolist()
    return CompiledGrammar([dict(zip(*row)) for row in zip(tokens, behind)], {*final}, TokenizerInfo(vocab), stop)
