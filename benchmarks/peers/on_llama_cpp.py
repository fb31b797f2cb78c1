"""llama.cpp as an engine of compare.py. A setting: "lookup", arguments of llama-cpp-python's prompt lookup (none: plain
steps), and arguments of its `Llama`.

It reads a GGUF file that is made of the model's folder in a temporary one, and quantised by llama.cpp itself: Q8_0 for
weights of "int8" and Q4_0 for "int4", its formats of the same size as ours.
"""

import tempfile
from pathlib import Path

import llama_cpp
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from benchmarks.peers import gguf_file

FILE_TYPES = {"int8": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0, "int4": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0}


def quantise(source: Path, path: Path, weights: str, threads: int) -> None:
    """Quantise a file by llama.cpp. ValueError if it has no format for these weights, or fails."""
    if weights not in FILE_TYPES:
        raise ValueError(f"weights: expected one of {', '.join(FILE_TYPES)} for llama.cpp, got {weights}")
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype, options.nthread = FILE_TYPES[weights], threads
    if llama_cpp.llama_model_quantize(bytes(source), bytes(path), options):
        raise ValueError(f"llama.cpp could not quantise {source}")


class LlamaCpp:
    """A model on a CPU, without a vocabulary."""

    version = llama_cpp.__version__

    def __init__(self, task: dict):
        setting = dict(task["setting"])
        lookup = setting.pop("lookup", None)
        with tempfile.TemporaryDirectory() as folder:
            path, packed = (Path(folder) / f"{name}.gguf" for name in ("model", "packed"))
            gguf_file.write(task["model"], path, task["dtype"])
            if task["weights"]:
                quantise(path, packed, task["weights"], task["threads"])
            self.llama = llama_cpp.Llama(
                str(packed if task["weights"] else path), n_ctx=task["max_len"] + 64, n_threads=task["threads"],
                n_threads_batch=task["threads"], n_gpu_layers=0, verbose=False,
                draft_model=LlamaPromptLookupDecoding(**lookup) if lookup else None, **setting,
            )  # fmt: skip
        self.new_tokens, self.eos, self.forwards = task["new_tokens"], set(task["eos"]), 0
        self._eval, self.llama.eval = self.llama.eval, self._counted

    def _counted(self, tokens) -> None:
        self.forwards += 1
        self._eval(tokens)

    def forget(self) -> None:
        self.llama.reset()

    def answer(self, ids: list[int]) -> list[int]:
        self.forwards, answer = 0, []
        for token in self.llama.generate(ids, temp=0.0, repeat_penalty=1.0):
            answer.append(int(token))
            if len(answer) == self.new_tokens or token in self.eos:
                return answer
        return answer

    def rounds(self, answer: list[int]) -> tuple[int, int]:
        given = max(len(answer) - 1, 1)  # the prompt's forward gives the first token
        return max(self.forwards - 1, 1), given


load = LlamaCpp
