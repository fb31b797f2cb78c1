"""What several modules of multi-token prediction draft without caches, and rounds that are compared with it."""

import copy

import torch
from draft_rounds import followed, grown, tree_of

from spec_compile.passes.outputs import FINAL


def with_further(first, own_output=False):
    """A head with two further modules, which are like it, each in its own way; with output matrices of their own if
    `own_output`."""
    generator, shared = torch.Generator().manual_seed(2), {id(w): w for w in (first.embedding, first.head_weight)}
    further = [copy.deepcopy(first, dict(shared)) for _ in range(2)]
    for module in further:
        if own_output:
            module.head_weight = torch.nn.Parameter(first.head_weight.detach().clone(), requires_grad=False)
        changed = module.fc.weight, module.block.self_attn.q_proj.weight, *([module.head_weight] if own_output else ())
        for weight in changed:
            weight.data += 0.1 * weight.std() * torch.randn(weight.shape, generator=generator)
    first = copy.copy(first)
    first._modules = {**first._modules, "further": torch.nn.ModuleList(further)}
    return first


def last_states(model, ids, taps):
    """The target's states [B, T, H] after its final norm, or before it."""
    states, decoder = [], model.get_decoder()
    norm = decoder.norm if hasattr(decoder, "norm") else decoder.norm_f
    hook = norm.register_forward_hook(lambda norm, given, out: states.append(out if taps == (FINAL,) else given[0]))
    model(ids, use_cache=False)
    hook.remove()
    return states[0]


@torch.no_grad()
def drafted(first, model, schedule, text):
    """What follows `text`: each node by running all modules over all slots before it, as they are defined.

    Module k reads the output of module k - 1 at the same slot, or the target's state, and the token k + 1 later.
    """
    ids, every = torch.tensor([text]), [first, *first.further]
    states = last_states(model, ids, first.taps)[:, :-1]
    slots = torch.arange(states.shape[1])[None]

    def output(path):
        tokens, state = torch.cat([ids[:, 1:], torch.tensor([path], dtype=torch.int64)], dim=1), states
        for number, module in enumerate(every[: len(path) + 1]):
            state, normed = module(tokens[:, number : number + slots.shape[1]], slots, state)
        return state[0, -1, :1], normed[0, -1] @ module.head_weight.T

    tokens, parents = grown(schedule, ids, output)
    return tokens[0].tolist(), parents[0].tolist()


def checked(system, first, model, ids, new=12, **options):
    """Generate, and compare the trees that each round proposes; the answer, and the number of trees."""
    algorithm = system.speculation.engine.runtime.algorithm
    is_joined = hasattr(algorithm, "ngram")
    schedule = algorithm.head.schedule if is_joined else algorithm.schedule

    def look(session, row, text):
        tokens, parents = drafted(first, model, schedule, text)
        parents = [max(parent, 0) for parent in parents] if is_joined else parents
        assert tree_of(session, row, len(tokens), is_joined) == (tokens, parents)

    return followed(system, ids, look, new, **options)
