"""Corpus and tokenizer of the demo model: permissively licensed Python sources of this machine.

Sources are found through package metadata, never downloaded. A package is used only when it is on
the allow-list below *and* its own metadata does not contradict the licence noted there.
"""

from __future__ import annotations

import ast
import hashlib
import re
import sys
import sysconfig
import warnings
from importlib import metadata
from pathlib import Path

EOT = "<|endoftext|>"
VOCAB = 4096
MAX_LENGTH = 2048

_ALLOWED = {
    "BSD": """numpy scipy pandas scikit-learn sympy mpmath networkx torch torchvision torchaudio seaborn
        scikit-image statsmodels h5py numba numba-cuda llvmlite werkzeug jinja2 markupsafe click pygments
        fsspec imageio joblib cloudpickle toolz httpx httpcore idna tifffile markdown patsy wrapt cycler
        contourpy portalocker kiwisolver multipledispatch astor dill nanobind pybind11 threadpoolctl
        lazy-loader psutil colorama""",
    "Apache": """transformers accelerate peft huggingface_hub safetensors tokenizers jax jaxlib flax optax
        chex orbax-checkpoint equinox diffrax optimistix lineax numpyro requests aiohttp yarl multidict
        frozenlist aiosignal lightning lightning-utilities timm sentence-transformers onnx onnx-ir xarray
        packaging absl-py coverage cython meson scikit-build-core torchmetrics sacrebleu sortedcontainers
        treescope etils prometheus-client aiofiles propcache""",
    "MIT": """botorch gpytorch linear-operator jaxtyping pytest pluggy iniconfig rich urllib3 pydantic setuptools
        pip wheel torch-geometric einops e3nn onnxscript attrs typer markdown-it-py mdurl tabulate six
        fonttools pyparsing narwhals formulaic triton torchdiffeq mypy-extensions pyyaml humanize
        interface-meta opt-einsum opt-einsum-fx pytest-xdist pytest-cov pytest-mock pytest-timeout execnet
        cupy-cuda13x anyio h11 wadler-lindig build pyproject-hooks cattrs annotated-types""",
    "PSF": "matplotlib typing-extensions",
    "ISC": "shellingham",
}
ALLOWED = {name: family for family, names in _ALLOWED.items() for name in names.split()}
SMOKE = ("networkx", "click", "jinja2", "rich")  # enough for a smoke run

_FAMILY = {
    "BSD": r"BSD",
    "Apache": r"Apache",
    "MIT": r"\bMIT\b",
    "PSF": r"PSF|Python Software Foundation",
    "ISC": r"\bISC",
}
_DENIED = re.compile(r"GPL|GNU |MPL|Mozilla|EUPL|CDDL|Proprietary|NonCommercial|\bNC\b|NVIDIA", re.I)
# runtime libraries inside binary wheels (scipy's gfortran, ...): not part of any .py file
_WHEEL_RUNTIME = re.compile(r"L?GPL-[\w.+-]+ WITH GCC-exception-3\.1", re.I)
_SKIP_PARTS = {
    "test", "tests", "idlelib", "lib2to3", "turtledemo", "_vendor", "vendor", "_vendored", "vendored",
    "vendored_packages", "extern", "_extern", "externals", "external", "third_party", "thirdparty",
    "site-packages", "node_modules", "__pycache__", "vendored_templates", "baseline_images",
}  # fmt: skip
_GENERATED = re.compile(
    r"(?i)generated (?:by|from|using|automatically)|auto-?(?:matically )?generated|do not edit|@generated"
)
_OTHER_LICENCE = re.compile(
    r"(?i)GNU (?:Lesser |Affero |General |Library )|\bA?L?GPL|Mozilla Public|non-?commercial|CC[- ]BY"
)
PACKAGE_CAP = 32_000_000  # bytes: no single package may dominate


def licence_of(dist: metadata.Distribution, family: str) -> str | None:
    """The licence that the package states, or None if it contradicts the allow-list."""
    meta = dist.metadata
    classifiers = [c.split("::")[-1].strip() for c in meta.get_all("Classifier") or [] if "License" in c]
    field = (meta.get("License") or "").strip().splitlines()
    field = field[0][:60] if field else ""
    stated = meta.get("License-Expression") or "; ".join(dict.fromkeys(classifiers)) or field
    evidence = _WHEEL_RUNTIME.sub("", " ; ".join([meta.get("License-Expression") or "", *classifiers, field]))
    if _DENIED.search(evidence):
        return None
    known = [name for name, pattern in _FAMILY.items() if re.search(pattern, evidence)]
    if known and family not in known:
        return None
    return stated if known else f"{family} (allow-list)"


def find_sources(smoke: bool) -> tuple[list[tuple[str, str]], dict[str, dict]]:
    """All candidate files as (package, path), and the facts about each package."""
    files, packages = [], {}
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    version = ".".join(map(str, sys.version_info[:3]))
    packages["python standard library"] = {"version": version, "licence": "PSF-2.0", "files": 0, "bytes": 0}
    for path in sorted(stdlib.rglob("*.py")):
        parts = path.relative_to(stdlib).parts
        if not _SKIP_PARTS & set(parts) and "dist-packages" not in parts and parts[0] != "ensurepip":
            files.append(("python standard library", str(path)))
    for name, family in ALLOWED.items():
        if smoke and name not in SMOKE:
            continue
        try:
            dist = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        licence = licence_of(dist, family)
        if licence is None:
            print(f"skipping {name}: its metadata contradicts the allow-list", flush=True)
            continue
        packages[name] = {"version": dist.version, "licence": licence, "files": 0, "bytes": 0}
        for entry in dist.files or []:
            if entry.suffix == ".py" and not _SKIP_PARTS & set(entry.parts):
                files.append((name, str(dist.locate_file(entry))))
    return files, packages


def strip_header(text: str) -> str:
    """The text without the comment block at the top, if that is a licence notice."""
    lines = text.split("\n")
    end = 0
    while end < len(lines) and (lines[end].startswith("#") or not lines[end].strip()):
        end += 1
    head = "\n".join(lines[:end])
    return "\n".join(lines[end:]) if re.search(r"(?i)copyright|licen[sc]e|-\*-|^#!", head) else text


def read_source(path: str) -> str | None:
    """The cleaned text of a file, or None if it does not parse or teaches nothing."""
    try:
        raw = Path(path).read_bytes()
        if not 300 <= len(raw) <= 250_000:
            return None
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    text = text.replace("\r\n", "\n").lstrip("\ufeff")
    if _GENERATED.search(text[:1500]) or _OTHER_LICENCE.search(text[:4000]) or EOT in text:
        return None
    lines = text.split("\n")
    digits = sum(map(text.count, "0123456789"))
    if max(map(len, lines)) > 400 or len(text) / len(lines) > 70 or digits > 0.10 * len(text):
        return None
    if len(raw) - len(text) > 0.01 * len(text) or "\x00" in text:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escape sequences in other people's strings
            ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    text = strip_header(text).strip("\n")
    return text + "\n" if len(text) >= 200 else None


def load_corpus(pool, smoke: bool) -> tuple[list[tuple[str, str]], list[tuple[str, str]], dict[str, dict]]:
    """(path, text) pairs for training and for validation (about 2 % of the files, by hash)."""
    files, packages = find_sources(smoke)
    seen, train, val = set(), [], []
    files.sort(key=lambda item: hashlib.sha1(item[1].encode()).digest())  # so that the cap keeps a random part
    for (name, path), text in zip(files, pool.imap(read_source, [p for _, p in files], chunksize=16)):
        if text is None or packages[name]["bytes"] > PACKAGE_CAP:
            continue
        key = hashlib.sha1(re.sub(r"\s+", " ", text).encode()).digest()
        if key in seen:
            continue
        seen.add(key)
        packages[name]["files"] += 1
        packages[name]["bytes"] += len(text)
        (val if key[0] < 5 else train).append((path, text))
    return train, val, {name: info for name, info in packages.items() if info["files"]}


# Indentation is one token with the newline before it; each digit is a token; a word takes one space.
_SPLIT = r"\n+ *| ?[\p{L}_]+|\p{N}| ?[^\s\p{L}\p{N}_]+|[^\S\n]+(?!\S)|[^\S\n]+"


def train_tokenizer(texts: list[str], out: Path):
    """Byte-level BPE, saved so that AutoTokenizer loads it; returns the `tokenizers` object."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        max_token_length=32,
        show_progress=False,
    )
    tok.train_from_iterator(texts, trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tok,
        bos_token=EOT,
        eos_token=EOT,
        pad_token=EOT,
        model_max_length=MAX_LENGTH,
        clean_up_tokenization_spaces=False,
        padding_side="left",
    ).save_pretrained(out)
    return tok
