"""What a user reads who gives something wrong: one error that names the argument, before any work."""

import io
import json
import random
import tarfile
import zipfile

import pytest
import torch
from models import ADMITTED
from torch._inductor import config as inductor

from spec_compile import NgramTrie, dump, speculate, train_draft
from spec_compile.__main__ import main
from spec_compile.drafters.checkpoints.files import load_pickled

CODER = "examples/tiny_coder"


@pytest.fixture(scope="module")
def model():
    return ADMITTED["llama"]()


@pytest.fixture(scope="module")
def fast(model):
    return speculate(model, compile=False)


# speculate() and what it returns


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(max_cache_len=10**12), ValueError, r"max_cache_len: a cache of 10+ tokens .* GB are missing"),
        (dict(max_cache_len=1), ValueError, "max_cache_len: expected at least 2 tokens, got 1"),
        (dict(max_cache_len="1"), TypeError, "max_cache_len: expected int, got str"),
        (dict(capacity=10**12), ValueError, "capacity must be from 36 to 2147483647"),
        (dict(capacity=1e6), TypeError, "capacity: expected int, got float"),
        (dict(branch_length=1), ValueError, "branch_length must be from 2 to 256"),
        (dict(max_match_window_size=18), ValueError, "max_match_window_size"),
        (dict(min_match_window_size=0), ValueError, "min_match_window_size"),
        (dict(min_bfs_breadth=4, max_bfs_breadth=2), ValueError, "max_bfs_breadth"),
        (dict(match_type="DFS"), ValueError, 'match_type must be "BFS"'),
        (dict(match_type=3), TypeError, "match_type: expected str, got int"),
        (dict(num_draft_tokens=0), ValueError, "num_draft_tokens: expected 1 to 64"),
        (dict(num_draft_tokens=True), TypeError, "num_draft_tokens: expected int, got bool"),
        (dict(compile="no"), ValueError, "compile: expected True, False or 'background', got 'no'"),
        (dict(compile=3), TypeError, "compile: expected bool or str, got int"),
        (dict(compiled=False), TypeError, "unknown option 'compiled'. Did you mean 'compile'?"),
        (dict(algo="ngrm"), ValueError, "ngrm.*Did you mean 'ngram'"),
        (dict(algo=None), (TypeError, ValueError), "algo"),
        (dict(attention_backend="nonsense"), ValueError, "attention_backend"),
        (dict(attention_backend={"draft": 3}), (TypeError, ValueError), "attention_backend"),
        (dict(kv_cache_dtype="fp4"), ValueError, "kv_cache_dtype: expected one of auto, fp8"),
        (dict(exact="bit"), ValueError, "exact: expected one of auto, bits, request, got 'bit'. Did you mean 'bits'?"),
        (dict(exact=True), TypeError, "exact: expected str, got bool"),
        (dict(draft="x"), TypeError, "unknown option 'draft'"),
        (dict(algo="eagle", draft="/none"), ValueError, "draft: '/none' is neither a folder nor a repository"),
        (dict(algo="eagle3", draft="/none", rope_theta=-1.0), ValueError, "rope_theta must be a positive, finite"),
        (dict(algo="eagle", draft="x", tree_choices=5), TypeError, "tree_choices must be paths of child ranks"),
        (dict(algo="eagle", draft="x", tree_choices="eagle2"), TypeError, "tree_choices must be paths .* not 'eagle2'"),
        (dict(algo="eagle", draft="x", tree_choices=[1, 2]), TypeError, "tree_choices must be paths of child ranks"),
        (dict(algo="eagle", draft="x", tree_choices=[["a"]]), TypeError, "a rank in tree_choices must be an int"),
        (dict(algo="eagle", draft="x", tree_choices=[]), ValueError, "the number of tree_choices must be from 1"),
        (dict(algo="eagle", draft="x", num_steps=0), ValueError, "num_steps"),
        (dict(algo="eagle", draft="x", topk=100), ValueError, "topk"),
        (dict(algo="eagle", draft="x", score_temperature=float("nan")), ValueError, "score_temperature"),
        (dict(algo="dflash", draft="/none", rope_theta=float("nan")), ValueError, "rope_theta must be a positive"),
        (dict(algo="dflash", draft=3), TypeError, "draft: expected a path"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_options(model, options, error, message):
    with pytest.raises(error, match=message):
        speculate(model, **{"compile": False, **options})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(batch_size=0), ValueError, "batch_size must be from 1 to 65536, not 0"),
        (dict(batch_size=-1), ValueError, "batch_size must be from 1 to 65536, not -1"),
        (dict(batch_size=True), TypeError, "batch_size must be an int from 1 to 65536, not bool"),
        (dict(batch_size="x"), TypeError, "batch_size must be an int from 1 to 65536, not str"),
        (dict(progress=3), TypeError, "progress must be a function of a line, not int"),
        (dict(do_sample="yes"), TypeError, "do_sample must be True or False, not str"),
    ],
)
def test_warmup(fast, arguments, error, message):
    with pytest.raises(error, match=message):
        fast.speculation.warmup(**arguments)


def test_reports_and_dumps(fast, model, tmp_path):
    with pytest.raises(RuntimeError, match=r"no generate\(\) was recorded; run it inside"):
        fast.speculation.report(tmp_path / "page.html")
    with pytest.raises(TypeError, match=r"model: expected the result of .*speculate, got Llama"):
        dump(model, tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"directory: .*file is a file"):
        dump(fast, tmp_path / "file")
    other = speculate(model, "draft_model", draft=model, compile=False, check=False)
    with pytest.raises(ValueError, match="reference: only n-grams copy from a reference; pass ngram=True"):
        other.generate(torch.ones(1, 3).long(), reference=[1])


def test_no_compiler(model, monkeypatch):
    """Said at once, not in the first generate(); without compilation none is needed."""
    monkeypatch.delenv("TORCH_INDUCTOR_INSTALL_GXX", raising=False)
    from torch._inductor import cpp_builder

    getattr(cpp_builder.cpp_compiler_search, "cache_clear", lambda: None)()
    refused = pytest.raises(ValueError, match=r"compile: .* C\+\+ compiler, and there is none .*pass compile=False")
    with inductor.patch({"cpp.cxx": (None, "no-such-compiler")}), refused:
        speculate(model)
    assert speculate(model, compile=False).generate(torch.ones(1, 3).long(), max_new_tokens=2).shape == (1, 5)
    getattr(cpp_builder.cpp_compiler_search, "cache_clear", lambda: None)()


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda trie: trie.add("text"), TypeError, "ids must be a 1-D tensor.*tokenize text first"),
        (lambda trie: trie.add([1.5]), TypeError, "ids must hold integer token ids"),
        (lambda trie: trie.add([[1], [100]]), ValueError, r"ids\[1\] holds token id 100"),
        (lambda trie: trie.propose(trie.open(), 0), ValueError, "num_draft_tokens must be from 1 to 64"),
        (lambda trie: trie.propose(trie.open(), 4), ValueError, "holds no token yet"),
        (lambda trie: trie.close(77), ValueError, "stream 77 is not open"),
        (lambda trie: trie.load("/none"), FileNotFoundError, "/none"),
        (lambda trie: trie.save("/none/file"), FileNotFoundError, "/none"),
    ],
)
def test_tries(call, error, message):
    with pytest.raises(error, match=message):
        call(NgramTrie(vocab_size=100))


# Pickled checkpoints


def damaged_pickles():
    """Files of torch.save that are cut short, changed at a bit or filled with something else."""

    def saved(value, **kwargs):
        file = io.BytesIO()
        torch.save(value, file, **kwargs)
        return file.getvalue()

    def archive(**records):
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as made:
            for name, content in records.items():
                made.writestr(name.replace("__", "/"), content)
        return file.getvalue()

    rng, tar = random.Random(0), io.BytesIO()
    tensors = {"a": torch.randn(5, 7), "b": torch.arange(9)}
    with tarfile.open(fileobj=tar, mode="w") as made:
        made.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    yield from (b"", bytes(100), rng.randbytes(1000), b"hello", b"<html>404</html>", tar.getvalue(), archive())
    yield from (archive(x__y="1"), archive(archive__data="1"), saved({"a": Evil()}), saved([torch.nn.Linear(2, 2)]))
    yield archive(**{"archive__data.pkl": b"\x80\x02.", "archive__version": "3"})
    for data in (saved(tensors), saved(tensors, _use_new_zipfile_serialization=False)):
        yield from (data[:size] for size in range(0, len(data), len(data) // 40))
        for _ in range(100):
            place = rng.randrange(len(data))
            yield data[:place] + bytes([data[place] ^ 1 << rng.randrange(8)]) + data[place + 1 :]


class Evil:
    def __reduce__(self):
        return pytest.fail, ("code of a file was run",)


@pytest.mark.filterwarnings("ignore")
def test_damaged_pickles(tmp_path):
    refused, path = 0, tmp_path / "pytorch_model.bin"
    for data in damaged_pickles():
        path.write_bytes(data)
        try:
            load_pickled(path)  # a bit of a weight leaves the file readable
        except ValueError as error:
            refused += 1
            assert str(error).startswith(f"draft: {path} cannot be read") and "weights_only" not in str(error)
    assert refused > 150


# The command line


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    (folder / "lines.jsonl").write_text('{"text": "no prompt"}\n')
    (folder / "broken.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    (folder / "binary").write_bytes(b"\xff\xfe\xff")
    (folder / "empty.txt").write_text("\n")
    (folder / "text.txt").write_text("some text to learn from\n" * 20)
    (folder / "config").mkdir()
    (folder / "config" / "config.json").write_text("{")
    return folder


AUDIT = ["audit", "--model", CODER, "--prompt", "def"]
TRAIN = ["train", "--model", CODER, "--output", "{files}/head", "--data", "{files}/text.txt"]
TRAIN += ["--validation", "0"]


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["audit", "--model", "{files}/none", "--prompt", "x"], "--model: there is no folder {files}/none"),
        (["audit", "--model", "./none", "--prompt", "x"], "--model: there is no folder ./none"),
        (["audit", "--model", "{files}/text.txt", "--prompt", "x"], "--model: {files}/text.txt is a file"),
        (["audit", "--model", "{files}/config", "--prompt", "x"], "--model: {files}/config cannot be loaded"),
        (["train", "--model", "{files}/none", "--data", "x", "--output", "y"], "--model: there is no folder"),
        (["audit", "--model", CODER], "give at least one --prompt"),
        (["audit", "--model", CODER, "--prompts", "{files}/none"], "--prompts: {files}/none cannot be read"),
        (["audit", "--model", CODER, "--prompts", "{files}"], "--prompts: {files} cannot be read"),
        (["audit", "--model", CODER, "--prompts", "{files}/binary"], "--prompts: {files}/binary cannot be read"),
        (["audit", "--model", CODER, "--prompts", "{files}/empty.txt"], "give at least one --prompt"),
        (["audit", "--model", CODER, "--prompts", "{files}/lines.jsonl"], 'jsonl:1: expected an object with "prompt"'),
        (["audit", "--model", CODER, "--prompts", "{files}/broken.jsonl"], "broken.jsonl:2: not JSON"),
        ([*AUDIT, "--limit", "-1"], "--limit: expected an int of 1 or more, got '-1'"),
        ([*AUDIT, "--samples", "-5"], "--samples: expected an int of 0 or more, got '-5'"),
        ([*AUDIT, "--max-new-tokens", "0"], "--max-new-tokens: expected an int of 1 or more, got '0'"),
        ([*AUDIT, "--max-new-tokens", "many"], "--max-new-tokens: expected an int of 1 or more, got 'many'"),
        ([*AUDIT, "--options", "{{"], "--options: expected a JSON object, got '{{'"),
        ([*AUDIT, "--options", "3"], "--options: expected a JSON object, got '3'"),
        ([*AUDIT, "--generate", "nonsense"], "--generate: expected a JSON object"),
        ([*AUDIT, "--options", '{{"compile": false, "num_draft": 3}}'], "unknown option 'num_draft'"),
        ([*AUDIT, "--options", '{{"model": 3}}'], "model"),
        ([*AUDIT, "--options", '{{"compile": false}}', "--generate", '{{"temperatur": 1}}'], "temperatur"),
        ([*AUDIT, "--algo", "ngrm"], "Did you mean 'ngram'"),
        ([*AUDIT, "--dtype", "float31"], "--dtype: invalid choice: 'float31'"),
        ([*AUDIT, "--device", "nonsense"], "--device: expected cpu, cuda or cuda:N, got 'nonsense'"),
        ([*AUDIT, "--device", "cuda:99"], "--device: cuda:99: torch sees"),
        ([*TRAIN, "--algo", "eagle9"], "algo"),
        ([*TRAIN, "--options", '{{"batch": 3}}'], "unknown option 'batch'"),
        ([*TRAIN, "--steps", "-5"], "steps must be from 1"),
        ([*TRAIN, "--steps", "1", "--minutes", "1"], "steps and minutes: give one of them"),
        ([*TRAIN, "--steps", "1", "--data", "{files}/none.txt"], "which does not exist"),
        ([*TRAIN, "--steps", "1", "--validation", "1.5"], "validation"),
        ([*TRAIN, "--steps", "1", "--output", "{files}/text.txt"], "output: {files}/text.txt is a file"),
        (["frobnicate"], "invalid choice: 'frobnicate'"),
        ([], "required: command"),
    ],
    ids=lambda value: " ".join(value)[-40:] if isinstance(value, list) else "",
)  # fmt: skip
def test_the_command_line(files, capsys, arguments, message):
    """Exit status 2 and one line that names the argument, no traceback."""
    try:
        status = main([argument.format(files=files) for argument in arguments])
    except SystemExit as exit:
        status = exit.code
    lines = capsys.readouterr().err.strip().splitlines()
    assert status == 2
    assert ": error: " in lines[-1] and message.format(files=files) in lines[-1]


def test_tracebacks_are_shown_when_asked_for(files):
    with pytest.raises(ValueError, match="there is no folder"):
        main(["--traceback", "audit", "--model", f"{files}/none", "--prompt", "x"])


# Training; tests/train has more


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(minutes=float("nan"), steps=None), ValueError, "minutes must be positive and finite"),
        (dict(batch_size="8"), TypeError, "batch_size must be an int"),
        (dict(taps=5), TypeError, "taps"),
        (dict(taps=["a"]), (TypeError, ValueError), "taps"),
        (dict(validation="x.csv"), ValueError, "validation"),
        (dict(progress=3), TypeError, "progress"),
        (dict(output=3), TypeError, "output"),
        (dict(resume="x"), TypeError, "resume"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_training(model, tmp_path, arguments, error, message):
    defaults = dict(data=[list(range(20))] * 40, output=tmp_path / "head", steps=1)
    with pytest.raises(error, match=message):
        train_draft(model, **{**defaults, **arguments})
    assert not (tmp_path / "head").exists()


def test_json_of_a_config_is_read_strictly(model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(ValueError, match=r"config.json holds a list; expected an object"):
        speculate(model, "dflash", draft=tmp_path, compile=False)
