"""Modules of transformers that are changed in a twin, so that their capture shows what they compute as markers.

Each function of `MODULES` changes one module, whose result stays the same. The checks after capture compare it with the
model's own forward, so that a wrong one is refused.
"""

from collections.abc import Callable

from torch import nn

from ...compat import TRANSFORMERS
from ...quantised.codes import class_path
from . import alibi, attention, experts, recurrent
from .attention import Attend


def connect(model: nn.Module, attend: Attend) -> list[int]:
    """Change every module of `model`, a twin, whose class is in `MODULES`.

    attend: the attention function that they call. Returns the lengths of tables of positions, which limit a text.
    """
    limits = [MODULES[name](part, attend) for part in model.modules() if (name := class_path(part)) in MODULES]
    return [limit for limit in limits if limit is not None]


_BY_CLASS: dict[str, Callable[[nn.Module, Attend], int | None]] = {
    "aria.modeling_aria.AriaTextMoELayer": experts.aria,
    "bloom.modeling_bloom.BloomAttention": alibi.bloom,
    "bloom.modeling_bloom.BloomModel": alibi.bloom_model,
    "dbrx.modeling_dbrx.DbrxExperts": experts.dbrx,
    "diffllama.modeling_diffllama.DiffLlamaAttention": attention.diffllama,
    "doge.modeling_doge.DogeAttention": attention.doge,
    "falcon.modeling_falcon.FalconAttention": alibi.falcon,
    "gpt_neo.modeling_gpt_neo.GPTNeoSelfAttention": attention.gpt_neo,
    "gpt_neox_japanese.modeling_gpt_neox_japanese.GPTNeoXJapaneseAttention": attention.gpt_neox_japanese,
    "llama4.modeling_llama4.Llama4TextDecoderLayer": attention.llama4,
    "longcat_flash.modeling_longcat_flash.LongcatFlashExperts": experts.longcat_flash,
    "minimax.modeling_minimax.MiniMaxLightningAttention": recurrent.lightning,
    "mpt.modeling_mpt.MptAttention": alibi.mpt,
    "mpt.modeling_mpt.MptModel": alibi.mpt_model,
    "openai.modeling_openai.Attention": attention.openai_gpt,
    "phimoe.modeling_phimoe.PhimoeAttention": attention.phimoe,
    "recurrent_gemma.modeling_recurrent_gemma.RecurrentGemmaRecurrentBlock": recurrent.griffin,
    "rwkv.modeling_rwkv.RwkvFeedForward": recurrent.rwkv,
    "rwkv.modeling_rwkv.RwkvSelfAttention": recurrent.rwkv,
    "xglm.modeling_xglm.XGLMAttention": attention.xglm,
    "xglm.modeling_xglm.XGLMSinusoidalPositionalEmbedding": attention.xglm_positions,
    "zaya.modeling_zaya.ZayaCCAProjection": recurrent.zaya,
}
_BY_CLASS |= {
    f"{name.lower()}.modeling_{name.lower()}.{name.replace('_', '')}ForCausalLM": attention.decoder
    for name in ("Bart", "BigBird_Pegasus", "Blenderbot", "Blenderbot_Small", "Marian", "MBart", "Pegasus", "PLBart")
}
_BY_CLASS |= (
    {
        "codegen.modeling_codegen.CodeGenRotaryEmbedding": attention.rotations,
        "gptj.modeling_gptj.GPTJRotaryEmbedding": attention.rotations,
    }
    if TRANSFORMERS >= (5, 24)  # their attention calls the interface
    else {
        "codegen.modeling_codegen.CodeGenAttention": attention.codegen,
        "gptj.modeling_gptj.GPTJAttention": attention.gptj,
    }
)
MODULES = {f"transformers.models.{name}": function for name, function in _BY_CLASS.items()}
"""The function that changes a module, by the path of its class."""
RECURRENT = {path for path, function in MODULES.items() if function.__module__ == recurrent.__name__}
"""Classes of modules that are changed so that they show recurrences."""
