"""`Judge`: a child process that compiles and follows grammars of clients, before the server does.

The child forks for each of them, with limits of time and memory that the system enforces. It runs this file, which
imports nothing else of the package.
"""

import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

MOST_MEMORY, MOST_WORKING, MOST_SPACES = 64 << 20, 512 << 20, 32
"""Bytes of a compiled grammar, bytes to compile it, and characters of white space between two parts of JSON."""
WALKS, STEPS = ("longest", "random", "words", "letters"), 64
"""Ways to choose the next token of a text that tries a grammar, and tokens of the text."""
WAITS = 8
"""Times its limit that a grammar may take if other programs have the processors."""


class Judge:
    """The child, which is started when it is first asked, and ends with this process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._owner = 0

    def ask(self, vocabulary: str, jobs: list[tuple[str, str]], limits: dict) -> tuple[int, str] | None:
        """None if grammars can be compiled and followed within limits, or else the number of a job and the reason.

        vocabulary: the path of xgrammar's TokenizerInfo as JSON
        jobs: the kind and the text of each grammar; all but the last are compiled for a vocabulary of bytes
        limits: seconds of a processor: `seconds` to compile, and as many to follow; the others are like the constants
            of `timed_matcher`

        OSError if the child cannot run.
        """
        with self._lock:
            if self._process is None or self._owner != os.getpid() or self._process.poll() is not None:
                self._process, self._owner = _start(), os.getpid()
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps([vocabulary, jobs, limits]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if not line:
            raise OSError("the process that tries grammars has ended")
        verdict = json.loads(line)
        return None if verdict is None else tuple(verdict)


def _start() -> "subprocess.Popen[str]":
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-P", __file__], env=environment, text=True, encoding="utf-8", start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip


def compile_grammar(info: Any, kind: str, text: str) -> Any:
    """xgrammar's compiled grammar. ValueError if it is too large or allows no token, RuntimeError if it is wrong.

    info: xgrammar's TokenizerInfo
    kind, text: see `GrammarCache.processor`
    """
    import torch
    from xgrammar import GrammarCompiler, GrammarMatcher

    compiler = GrammarCompiler(info, max_threads=1, cache_enabled=False)
    if kind == "json":
        grammar = compiler.compile_json_schema(text, max_whitespace_cnt=MOST_SPACES)
    else:
        compilers = {"regex": compiler.compile_regex, "structural_tag": compiler.compile_structural_tag}
        grammar = compilers.get(kind, compiler.compile_grammar)(text)
    if grammar.memory_size_bytes > MOST_MEMORY:
        raise ValueError(f"it takes {grammar.memory_size_bytes} bytes, and may take {MOST_MEMORY}")
    bits = torch.zeros(1, -(-info.vocab_size // 32), dtype=torch.int32)
    GrammarMatcher(grammar).fill_next_token_bitmask(bits)
    if not bits.any():
        raise ValueError("it allows no first token")
    return grammar


def follow(grammar: Any, info: Any, limits: dict) -> None:
    """Follow a few texts that a grammar allows. TimeoutError if a step takes too long, or all of them do."""
    import numpy as np
    import torch
    from xgrammar import GrammarMatcher

    ends = {*info.stop_token_ids, *info.special_token_ids}
    texts = [b"" if token in ends else text for token, text in enumerate(info.decoded_vocab)]
    sizes = np.array([*map(len, texts)])
    words = np.array([len(text) * text.isalnum() or not text.isspace() for text in texts])
    noise = np.random.default_rng(0)
    orders = {"longest": sizes, "words": words, "letters": words.clip(max=2) - sizes / 1024}
    bits = torch.zeros(1, -(-info.vocab_size // 32), dtype=torch.int32)
    seen = np.frombuffer(bits.numpy(), np.uint8)
    for walk in WALKS:
        matcher, left = GrammarMatcher(grammar), limits["first"]
        for _ in range(STEPS):
            begin = time.process_time()
            matcher.fill_next_token_bitmask(bits)
            filled = time.process_time()
            legal = np.unpackbits(seen, bitorder="little", count=len(sizes)) * (sizes > 0)
            if not legal.any():
                break
            order = orders[walk] if walk in orders else noise.random(len(sizes), np.float32)
            token, chosen = int(np.where(legal, order, -1).argmax()), time.process_time()
            if not matcher.accept_token(token) or matcher.is_terminated():
                break
            steps = filled - begin, time.process_time() - chosen
            left = min(limits["first"], left + 2 * limits["each"] - sum(steps))
            if max(steps) > limits["step"] or left < 0:
                raise TimeoutError


@cache
def _info(path: str) -> Any:
    """xgrammar's TokenizerInfo in a file."""
    from xgrammar import TokenizerInfo

    return TokenizerInfo.deserialize_json(Path(path).read_text())


@cache
def bytes_info() -> Any:
    """A vocabulary of one token for each byte, for which grammars are compiled at once."""
    from xgrammar import TokenizerInfo

    return TokenizerInfo([*(bytes([byte]) for byte in range(256)), b"</s>"], stop_token_ids=[256])


def _try(vocabulary: str, jobs: list, limits: dict, number: int) -> str:
    """Try one grammar in a process that has nothing else to do. Returns what is wrong with it, or ""."""
    info = bytes_info() if number + 1 < len(jobs) else _info(vocabulary)
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process
    signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
    try:
        grammar = compile_grammar(info, *jobs[number])
    except Exception as error:
        return f"it cannot be compiled: {str(error)[:400]}"
    signal.setitimer(signal.ITIMER_PROF, limits["seconds"])
    try:
        follow(grammar, info, limits)
    except TimeoutError:
        return "it takes too long to follow; send a simpler one, without nested or ambiguous repetitions"
    return ""


def _fork(vocabulary: str, jobs: list, limits: dict) -> tuple[int, str] | None:
    """`Judge.ask` in the child."""
    bytes_info(), _info(vocabulary)  # once for all
    output, input_ = os.pipe()
    child = os.fork()
    if child == 0:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MOST_WORKING,) * 2)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.nice(10)
        for number in range(len(jobs)):
            os.write(input_, json.dumps([number, _try(vocabulary, jobs, limits, number)]).encode() + b"\n")
        os._exit(0)
    os.close(input_)
    text, end = b"", time.monotonic() + 2 * WAITS * limits["seconds"]
    while select.select([output], [], [], max(0.0, end - time.monotonic()))[0]:
        if not (part := os.read(output, 1 << 16)):
            break
        text += part
    os.close(output)
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    verdicts = [json.loads(line) for line in text.splitlines()]
    faults = [verdict for verdict in verdicts if verdict[1]]
    if faults or len(verdicts) == len(jobs):
        return faults[0] if faults else None
    bounds = f"{limits['seconds']:g} seconds or {MOST_WORKING >> 20} MB"
    return len(verdicts), f"it takes more than {bounds} to compile and follow; send a smaller one"


def main() -> None:
    """Answer one line of JSON after the other, until the server ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        print(json.dumps(_fork(*json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
