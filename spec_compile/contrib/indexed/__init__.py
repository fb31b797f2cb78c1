"""DeepSeek sparse attention (DSA): an indexer chooses the few tokens that each token attends to.

`choice` has the choice and the pass that puts it into a graph, `capture` shows it in a captured graph, and `attention`
has the kernels.
"""

from functools import partial

from torch import Tensor

from ...capture import checks, modules, trace
from ...kernels.attention.base import LAUNCHES, AttentionCall
from ...passes import register, row_invariance
from . import capture, choice

INTERLEAVED = partial(capture.mark, rotation="apply_rotary_pos_emb_interleave")
modules.MODULES |= {
    f"transformers.models.{name}": change
    for name, change in {
        "axk2.modeling_axk2.AXK2Attention": capture.mark,
        "deepseek_v32.modeling_deepseek_v32.DeepseekV32Attention": capture.mark,
        "dots3_note.modeling_dots3_note.Dots3NoteTextAttention": INTERLEAVED,
        "glm_moe_dsa.modeling_glm_moe_dsa.GlmMoeDsaAttention": INTERLEAVED,
        "hy_v4.modeling_hy_v4.HYV4Attention": partial(capture.mark, is_first=False),
    }.items()
}
trace.FACTS["indexes"] = capture.describe
checks.TIES.append(capture.earlier_of_equal)
register(choice.use_indexes, after="use_tree_attention")
row_invariance.FUNCTIONS.add(choice.visible_to)


def launch(call: AttentionCall, q: Tensor) -> Tensor:
    """Attention to the chosen slots by the kernels, which need Triton, so they are imported when they are launched."""
    from .attention import launch

    return launch(call, q)


LAUNCHES["chosen"] = launch
