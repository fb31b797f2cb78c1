"""The options that every algorithm has. An algorithm's file adds others, and all are checked before any work starts."""

import inspect
import re
import textwrap
from dataclasses import Field, dataclass, fields, is_dataclass
from functools import cached_property
from os import PathLike
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from .errors import did_you_mean
from .kernels import attention
from .parallel.ranks import ALONE, Alone
from .quantised import rounded
from .tree import MAX_NODES

CACHE_DTYPES = ("auto", "fp8", "fp8_per_token_head")
EXACT = ("auto", "bits", "request")
WEIGHTS = (None, *rounded.FORMATS)


def promises_bits(exact: str, device_type: str) -> bool:
    """True if the option promises bits on a type of device, so that what cannot keep them is refused. On a CPU
    "request" gives prompts fixed chunks in place of them."""
    return exact == "bits" or (exact == "request" and device_type != "cpu")


MOST_LORAS, MOST_RANK = 1024, 1024
COMPILE = (True, False, "background")
Parsed = TypeVar("Parsed")


@dataclass(frozen=True)
class Options:
    """Options of `speculate` with every algorithm.

    num_draft_tokens: nodes verified a round, the root included (1 to 64; 1: plain decoding, nothing is drafted).
    adaptive: let each round verify fewer nodes, or draft nothing, if more have not paid for their time so far (False:
        every proposed node is verified). Answers do not depend on it.
    max_cache_len: tokens a sequence may hold, prompt included (default: the length that the model was trained for, as
        far as a quarter of the memory goes; on a GPU 8192 at most).
    compile: run rounds through Inductor. "background": the first rounds run eagerly, and compiled ones take their place
        between two calls, as soon as other processes have compiled them; True: before the first round; False: never.
    cuda_graphs: on a GPU, capture each round in one CUDA graph (False: for debugging; same tokens).
    check: compare the captured graphs with the model's own forward before use.
    merge_linears: make one matrix product of linear layers of one input (q, k and v; gate and up).
    attention_backend: the kernels of attention on a GPU: a name of `kernels.attention.BACKENDS`, "auto", or a dict of
        names for "prefill" (prompts), "verify" and "draft" (a draft's trees; a head's prompts, too).
    weights: "fp8", "int8" or "int4" rounds the linear layers of the model at load, and holds them only so: by output,
        or with int4 by groups of 32 to 128 inputs. The output head stays, but on a CPU int8 and int4 round it to 8
        bits. The rounded model decides the answers (None: weights stay as they are).
    convert_bfloat16: on a GPU without bfloat16 (compute capability below 8.0, such as a T4), convert the weights of the
        model, and of a draft, to float16, in place and with a warning (False: refuse the model).
    kv_cache_dtype: the target's keys and values in the cache: "auto" (the model's dtype); "fp8": on a GPU, rounded to
        float8_e4m3fn, which halves them and changes answers a little; or "fp8_per_token_head": on any device, the same
        with a scale for each token and KV head.
    prefix_cache_bytes: bytes of pages, beyond what full rows take, in which continuous batching keeps keys and values
        of texts for prompts that begin like them (None: on a GPU as many pages again).
    prefix_cache_host_bytes: bytes of the host's memory for copies of a GPU's pages and for states; on a CPU also for
        pages (0: none; default: a tenth of the memory, at most 4 GB).
    exact: "bits" refuses, by name, every model and setting in which the logits of a token may depend on the drafts in
        its tree. "request" also refuses those in which they may depend on anything but the tokens before it, as on the
        size of a prompt's chunk, on other requests or on a copied prefix, and has quantised weights of prompts
        multiplied by the kernels of rounds, which is slower; on a CPU it promises no bits, but gives prompts fixed
        chunks. "auto" refuses nothing, and `explain()` names the parts that prevent both.
    cache: keep what a start finds out on disk for the next one: True ($SPEC_COMPILE_CACHE, by default
        ``~/.cache/spec_compile``), a folder, or False.
    artefact: a folder that ``speculation.save(folder)`` has made, to start from it. Its compiled code is loaded if you
        have made it on this machine, and otherwise compiled anew.
    trust_artefact: load the compiled code of that folder whoever has made it. It runs with your rights.
    max_loras: LoRA adapters of peft that rounds may read at once, so that each row of a batch chooses one by its name
        (0: the active adapters are captured, for all rows).
    max_lora_rank: largest rank of such adapters (default: the largest that the model has at speculate()).
    tensor_parallel: the processes that share the model, each on another GPU: None (only this one), "auto" (all
        that torchrun has started), their number, or a process group or device mesh.
    expert_parallel: with tensor_parallel, the processes share routed experts by their numbers: each has some experts,
        and all of these (True); or by their width: each has a part of every expert (False; default: by width, unless
        the width, or the groups of quantised weights, do not divide).
    """

    num_draft_tokens: int = 16
    adaptive: bool = True
    max_cache_len: int | None = None
    compile: bool | str = "background"
    cuda_graphs: bool = True
    check: bool = True
    merge_linears: bool = True
    attention_backend: Any = "auto"
    weights: str | None = None
    convert_bfloat16: bool = True
    kv_cache_dtype: str = "auto"
    prefix_cache_bytes: int | None = None
    prefix_cache_host_bytes: int | None = None
    exact: str = "auto"
    cache: Any = True
    artefact: Any = None
    trust_artefact: bool = False
    max_loras: int = 0
    max_lora_rank: int | None = None
    tensor_parallel: Any = None
    expert_parallel: bool | None = None

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            value, types = getattr(self, field.name), get_args(hints[field.name]) or (hints[field.name],)
            # A bool is an int in Python but not as an option. An int is taken as a float.
            fits = Any in types or (isinstance(value, types) and (bool in types or not isinstance(value, bool)))
            if not fits and not (float in types and type(value) is int):
                expected = " or ".join(each.__name__ for each in types if each is not type(None))
                raise TypeError(f"{field.name}: expected {expected}, got {type(value).__name__} ({value!r})")
        if self.num_draft_tokens is not None and not 1 <= self.num_draft_tokens <= MAX_NODES:
            raise ValueError(
                f"num_draft_tokens: expected 1 to {MAX_NODES} (nodes verified a round, the root included), "
                f"got {self.num_draft_tokens}"
            )
        if self.max_cache_len is not None and self.max_cache_len < 2:
            raise ValueError(f"max_cache_len: expected at least 2 tokens, got {self.max_cache_len}")
        for name in ("prefix_cache_bytes", "prefix_cache_host_bytes"):
            if (getattr(self, name) or 0) < 0:
                raise ValueError(f"{name}: expected 0 bytes or more, got {getattr(self, name)}")
        for name, least, most in (("max_loras", 0, MOST_LORAS), ("max_lora_rank", 1, MOST_RANK)):
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                raise ValueError(f"{name}: expected {least} to {most}, got {value}")
        if self.max_lora_rank is not None and not self.max_loras:
            raise ValueError("max_lora_rank: without max_loras no row chooses an adapter; pass max_loras, too")
        for name, known in (("kv_cache_dtype", CACHE_DTYPES), ("exact", EXACT), ("weights", WEIGHTS)):
            value = getattr(self, name)
            if value not in known:
                raise ValueError(
                    f"{name}: expected one of {', '.join(map(str, known))}, got {value!r}."
                    + did_you_mean(value, filter(None, known))
                )
        if not isinstance(self.cache, (bool, str, PathLike)):
            raise TypeError(f"cache: expected bool or a folder, got {type(self.cache).__name__} ({self.cache!r})")
        if not isinstance(self.artefact, (str, PathLike, type(None))):
            raise TypeError(f"artefact: expected a folder, got {type(self.artefact).__name__} ({self.artefact!r})")
        if self.artefact is not None and not Path(self.artefact).is_dir():
            raise ValueError(f"artefact: expected a folder that speculation.save() has made, got {self.artefact}")
        if self.compile not in COMPILE:
            raise ValueError(f"compile: expected True, False or 'background', got {self.compile!r}")
        _ = self.attention_backends  # raises if a name is not a backend's

    @property
    def ranks(self) -> Alone:
        """The processes that share the model."""
        return self.tensor_parallel if isinstance(self.tensor_parallel, Alone) else ALONE

    @cached_property
    def attention_backends(self) -> dict[str, str]:
        """The name of a backend, or "auto", for each of `kernels.attention.ROLES`."""
        return attention.parse(self.attention_backend)

    def attention(self, role: str, of_draft: bool = False) -> attention.Use:
        """The demands of a role's graph (one of `kernels.attention.ROLES`) on its attention backend.

        of_draft: the graph is a draft's, whose cache has the draft's dtype; so is every graph of the role "draft".
        """
        captured = self.cuda_graphs and role != "prefill"
        cache = "auto" if of_draft or role == "draft" else self.kv_cache_dtype
        fp8, scaled = cache != "auto", cache == "fp8_per_token_head"
        return attention.Use(self.attention_backends[role], role, captured, fp8, scaled)


def meanings(cls: type) -> dict[str, str]:
    """The meaning of each option of a dataclass, by name, from the docstrings of the class and its bases.

    A line or a sentence there that begins with "name: " or "name, name: " is followed by the meaning of these options.
    """
    names, said = "|".join(field.name for field in fields(cls)), dict[str, str]()
    for base in filter(is_dataclass, reversed(cls.__mro__)):
        text = inspect.cleandoc(base.__doc__ or "")
        heads = list(re.finditer(rf"(?:^|(?<=\. ))((?:{names})(?:,\s(?:{names}))*):\s", text, re.MULTILINE))
        ends = [head.start() for head in heads[1:]] + [len(text)]
        pairs = [(head[1], " ".join(text[head.end() : end].split())) for head, end in zip(heads, ends)]
        said |= {name: meaning for several, meaning in pairs for name in re.split(r",\s", several)}
    return said


def kind(hint: Any) -> str:
    """The name of a type for readers; "" for any type, which the meaning describes."""
    parts = [part for part in (get_args(hint) if isinstance(hint, UnionType) else (hint,)) if part is not type(None)]
    return " or ".join(getattr(part, "__name__", str(part)) for part in parts if part is not Any)


def added(cls: type, to: type | None = None) -> list[Field]:
    """The fields of a dataclass, without those that `to` has with the same default."""
    known = {} if to is None else {field.name: field.default for field in fields(to)}
    return [field for field in fields(cls) if field.name not in known or known[field.name] != field.default]


def describe(cls: type, to: type | None = None) -> list[str]:
    """Lines for help() about the options that are `added`."""
    said, hints, lines = meanings(cls), get_type_hints(cls), list[str]()
    for field in added(cls, to):
        facts = [kind(hints[field.name]), "" if field.default is None else f"default {field.default!r}"]
        about = f"{', '.join(filter(None, facts)) or 'default None'}; {said.get(field.name, '')}"
        lines += textwrap.wrap(f"{field.name}: {about}", 112, initial_indent="    ", subsequent_indent=" " * 8)
    return lines


def parse_options(cls: type[Parsed], options: dict[str, Any]) -> Parsed:
    """The dataclass `cls`, built from a user's options. TypeError, with a did-you-mean, if one is unknown."""
    known = [field.name for field in fields(cls)]  # type: ignore[arg-type]
    for name in options:
        if name not in known:
            raise TypeError(
                f"unknown option {name!r}.{did_you_mean(str(name), known)} Known options: {', '.join(known)}"
            )
    return cls(**options)
