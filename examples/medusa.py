"""Medusa (arXiv:2401.10774): a few heads over the target's last hidden state draft a tree at once."""

import sys
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile import speculate
from spec_compile.config import Options
from spec_compile.drafters import ALGORITHMS, Entry
from spec_compile.drafters.shared_draft import keep_row, tapped_states
from spec_compile.drafters.trees.propose import BlockProposer
from spec_compile.drafting import Algorithm, Drafter, DraftPlan
from spec_compile.passes.outputs import FINAL


class MedusaHeads(nn.Module):
    """Head k predicts, from the hidden state at token t, token t + k + 1. The output matrix is the target's."""

    def __init__(self, model, count: int = 3):
        super().__init__()
        self.output = model.get_output_embeddings().weight
        self.blocks = nn.ModuleList(nn.Linear(*2 * self.output.shape[1:]) for _ in range(count)).to(self.output)

    def forward(self, hidden):
        """hidden [B, h] -> logits [B, K, V]."""
        return F.linear(torch.stack([hidden + F.silu(block(hidden)) for block in self.blocks], dim=1), self.output)

    def fit(self, model, ids, steps: int = 50):
        """Train the heads on texts, ids [B, T]; returns them."""
        (states,), _ = tapped_states(model, (FINAL,), ids)
        after = ids.unfold(1, len(self.blocks) + 2, 1)  # [B, T - K - 1, K + 2]
        hidden, wanted = states[:, : after.shape[1]].flatten(0, 1).detach(), after[:, :, 2:].flatten()
        optimizer = torch.optim.Adam(parameters := list(self.blocks.parameters()), 3e-3)
        for _ in range(steps):
            optimizer.zero_grad()
            F.cross_entropy(self(hidden).flatten(0, 1), wanted).backward(inputs=parameters)
            optimizer.step()
        return self


@dataclass(frozen=True)
class MedusaOptions(Options):
    draft: MedusaHeads = None
    topk: int = 4  # tokens of each head


class Medusa(Algorithm):
    def __init__(self, model, options: MedusaOptions):
        self.draft_module, nodes = options.draft, options.num_draft_tokens
        self.trees = BlockProposer(len(options.draft.blocks), options.topk, nodes, draws=False)
        self.plan = DraftPlan(nodes, taps=(FINAL,))  # every tree has so many nodes; features[0] are the last states

    def drafter(self, batch, slots):
        return MedusaDrafter(self.draft_module, self.trees, batch)


class MedusaDrafter(Drafter):
    """Keeps the hidden state that predicted the last committed token."""

    def __init__(self, heads: MedusaHeads, trees: BlockProposer, batch: int):
        super().__init__()
        self.heads, self.trees = heads, trees
        self.register_buffer("hidden", heads.output.new_zeros(batch, heads.output.shape[1]))

    def prefill(self, state, ids, positions, features, max_kv_len):
        last = state.prompt_lengths - 2 - state.lengths  # the prompt's last token is the first root
        keep_row(self.hidden, features[0], last, (last >= 0) & (last < ids.shape[1]))

    def observe(self, state, features, accepted, begin, max_kv_len):
        last = accepted.path.gather(1, accepted.count[:, None] - 1)[:, 0]
        keep_row(self.hidden, features[0], last, state.lengths > begin)

    def propose(self, state, max_kv_len):
        self.trees.propose(state, self.heads(self.hidden.clone()))


ALGORITHMS["medusa"] = Entry(MedusaOptions, Medusa)

if __name__ == "__main__":
    name = sys.argv[1] if len(sys.argv) > 1 else "examples/tiny_coder"  # or any causal model
    model = AutoModelForCausalLM.from_pretrained(name, dtype="float32")
    inputs = AutoTokenizer.from_pretrained(name)("class Settings:\n    def load(self):\n", return_tensors="pt")
    texts = model.generate(**inputs, do_sample=True, min_new_tokens=200, max_new_tokens=200, num_return_sequences=4)
    fast = speculate(model, "medusa", draft=MedusaHeads(model).fit(model, texts), compile=False)
    plain, drafted = (net.generate(**inputs, max_new_tokens=128, do_sample=False) for net in (model, fast))
    print(f"same tokens: {torch.equal(plain, drafted)}", fast.speculation.stats, sep="\n")
