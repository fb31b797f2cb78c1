"""Which `modules.transitions.Transition` a DFlash draft has: that of DFlash 2, DSpark or Domino, or none."""

from ...kernels.top_logits import MAX_K
from ..modules.transitions import Domino, GatedMarkov, Markov, RecurrentMarkov, Selector, Transition
from .dflash_config import DFlashConfig

MARKOV = {"vanilla": Markov, "gated": GatedMarkov, "rnn": RecurrentMarkov}


def read_transition(config: DFlashConfig, hidden_size: int, vocab_size: int, rows: int) -> Transition | None:
    """The transition that `config` asks for, without weights; None if it asks for none.

    hidden_size: of the draft. vocab_size: the target's tokens. rows: tokens that the draft can draft.
    Raises ValueError, naming the key, if it asks for two, or for one that is not built here.
    """
    switches = {
        "markov_rank": bool(config.get("markov_rank", config.get("projector_type") == "dspark")),
        "selector_rank": bool(config.get("selector_rank") or config.get("selector_top_k")),
        "projector_type 'domino'": config.is_domino,
    }
    asked = [name for name, is_on in switches.items() if is_on]
    if len(asked) > 1:
        raise ValueError(f"draft: its config has {' and '.join(asked)}, of which a draft can have one")
    sizes = hidden_size, vocab_size, rows
    if asked == ["markov_rank"]:
        return _markov(config, sizes)
    if asked == ["selector_rank"]:
        rank, candidates = config.whole("selector_rank", 1), config.whole("selector_top_k", 2)
        if candidates > min(MAX_K, rows):
            raise ValueError(
                f"draft: its config has selector_top_k {candidates}, at most {min(MAX_K, rows)} are built here"
            )
        return Selector(*sizes, rank, candidates)
    if asked:
        ranks = (config.whole(name, 1) for name in ("emb_dim", "gru_hidden_dim"))
        skipped = config.get("pure_draft_prefix_len", 0)
        return Domino(hidden_size, rows, *ranks, skipped)
    return None


def _markov(config: DFlashConfig, sizes: tuple[int, int, int]) -> Markov:
    name = config.get("markov_head_type", "vanilla")
    if name not in MARKOV:
        raise ValueError(f"draft: its config has markov_head_type {name!r}; expected one of {', '.join(MARKOV)}")
    return MARKOV[name](*sizes, config.whole("markov_rank", 1))
