"""Starts from artefacts: no export, no passes, no full checks, and equal tokens; every fault gives a full start."""

import json
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path

import captures
import models
import pytest
import quantised_models
import torch
import transformers
from packed_layers import packed

import spec_compile
from spec_compile import api, passes, speculate
from spec_compile.capture.checks import UNPADDED
from spec_compile.compile.cache import ArtefactCache
from spec_compile.compile.start import ITEM, StoredParts
from spec_compile.drafters import heads, self_check
from spec_compile.folders import user_secret
from spec_compile.runtime.compiled_steps import _classes, _facts, identity_of

ROOT = Path(__file__).parents[2]
EAGLE = ROOT / "examples/tiny_coder/heads/eagle3"
IDS = torch.arange(5, 17)[None]
NEW = {"max_new_tokens": 12, "do_sample": False}
CASES = {
    "llama": ("llama", "ngram", {}), "hybrid": ("qwen3_next", "ngram", {}), "experts": ("mixtral", "ngram", {}),
    "head": ("tiny_coder", "eagle3", {"draft": str(EAGLE)}),
}  # fmt: skip


CHILD = """
import json, sys
import test_start as test, torch
torch.set_num_threads(1)
found = {}
for name in test.CASES:
    fast = test.started(name, sys.argv[1])
    found[name] = [fast.speculation.is_from_artefact, test.answer(fast), test.identity(fast)]
print(json.dumps(found))
"""


def model_of(name):
    if name != "tiny_coder":
        return {**models.ADMITTED, **models.HYBRIDS}[name]()
    return transformers.AutoModelForCausalLM.from_pretrained(EAGLE.parents[1], dtype=torch.float32).eval()


def started(name, cache, **options):
    model, algo, more = CASES[name]
    return speculate(model_of(model), algo, compile=False, cache=str(cache), **{**more, **options})


def answer(model):
    return model.generate(IDS, **NEW)[0].tolist()


def identity(model):
    """By which a later process finds parts."""
    engine = model.speculation.engine
    return identity_of(_facts(engine.name, engine.runtime), _classes(engine.runtime))


@pytest.mark.slow
def test_processes_that_start_at_once_leave_the_same(tmp_path):
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/support"), str(ROOT / "tests/compile")])

    def child():
        command = [sys.executable, "-c", CHILD, str(tmp_path)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})

    both = [child(), child()]
    found = [each.communicate()[0] for each in both]
    found = [json.loads(text) for text in (*found, child().communicate()[0])]
    for name, (source, _, _) in CASES.items():
        assert all(each[name][1:] == found[0][name][1:] for each in found)
        assert found[0][name][1] == answer(model_of(source)) and found[0][name][2] and found[2][name][0]


@pytest.fixture
def no_work(monkeypatch):
    """A function: from now on nothing is captured, rewritten or fully checked. Heads are rewritten by every start."""

    def begin(rewrites=False):
        work = [(api, "capture"), (api, "check_capture"), (api, "check_tree"), (api, "check_generation")]
        work += [(heads, "capture_head"), (self_check, "_write"), *([] if rewrites else [(passes, "run")])]
        for home, name in work:
            monkeypatch.setattr(home, name, lambda *_, name=name: pytest.fail(f"{name} was called"))

    return begin


@pytest.mark.sweep("llama")
@pytest.mark.parametrize("name", CASES)
def test_a_start_from_an_artefact_captures_and_rewrites_nothing(name, tmp_path, no_work):
    """Nor does it read a head in two ways, also if the artefact was carried."""
    folder, first = tmp_path / "folder", started(name, tmp_path / "cache")
    first.speculation.save(folder)
    no_work(rewrites=name == "head")
    for options in (dict(cache=tmp_path / "cache"), dict(cache="off", artefact=folder)):
        fast = started(name, **options)
        assert fast.speculation.is_from_artefact and answer(fast) == answer(first)


@pytest.fixture
def warnings(caplog):
    """The lines that the package logs."""
    caplog.set_level(logging.WARNING, logger="spec_compile")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "spec_compile"]


def is_hit(cache, name="llama", **options):
    fast = started(name, cache, **options) if isinstance(name, str) else speculate(name, compile=False, cache=cache)
    assert answer(fast) == answer(fast.speculation.original)
    return fast.speculation.is_from_artefact


def test_other_weights_start_from_the_same_artefact(tmp_path, warnings):
    assert not is_hit(tmp_path)
    other = model_of("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    fast = speculate(other, compile=False, cache=tmp_path)
    assert fast.speculation.is_from_artefact and answer(fast) == answer(other) != answer(model_of("llama"))
    assert not warnings()


def test_batches_that_are_not_served_stay_so(tmp_path, monkeypatch):
    monkeypatch.setattr(api, "check_generation", lambda *arguments: UNPADDED)
    for is_second in (False, True):
        speculation = started("llama", tmp_path).speculation
        assert speculation.is_from_artefact == is_second and speculation.engine.served_batches == UNPADDED


def test_values_that_a_start_reads_are_watched(tmp_path):
    for _ in range(2):
        model = model_of("gemma2")
        fast = speculate(model, compile=False, cache=tmp_path)
    assert fast.speculation.is_from_artefact
    model.config.final_logit_softcapping = 0.5
    with pytest.raises(RuntimeError, match=r"config\.final_logit_softcapping"):
        answer(fast)
    model.config.final_logit_softcapping = 10.0
    replaced = {name: torch.randn_like(x) * 0.1 for name, x in model.state_dict().items()}
    model.load_state_dict(replaced, assign=True)
    model.tie_weights()
    fast.speculation.refresh()
    assert answer(fast) == answer(model)


def entry(cache):
    (stored,) = ArtefactCache(cache).entries()
    return ArtefactCache(cache), stored.key


def change_content(cache, change):
    store, key = entry(cache)
    content = json.loads(store.read(key, ITEM))
    change(content)
    store.write(key, ITEM, json.dumps(content).encode())


def foreign(cache):
    """The entry of another model under this key."""
    other = cache.with_name("other")
    is_hit(other, "experts")
    theirs, their_key = entry(other)
    store, key = entry(cache)
    store.write(key, ITEM, theirs.read(their_key, ITEM))


def wrong_operator(content):
    next(row for row in content["graphs"]["verify"]["rows"] if row[0] == "aten.add.Tensor")[0] = "os.system"


def wrong_number(role):
    def change(content):
        rows = content["graphs"][role]["rows"]
        next(row for row in rows if row[0] == "aten.add.Tensor" and isinstance(row[1][1], float))[1][1] = 0.5

    return change


def wrong_weight(content):
    tensors = content["graphs"]["verify"]["tensors"]
    names = [name for name in tensors if name.endswith("layernorm.weight")]
    tensors[names[0]], tensors[names[1]] = tensors[names[1]], tensors[names[0]]


FAULTS = {
    "half": lambda content: content["graphs"].pop("prefill"),
    "no tensor": lambda content: content["graphs"]["verify"]["tensors"].update({"model.x": {"path": "x"}}),
    "config": lambda content: content["reads"].append(["x"]),
    "operator": wrong_operator,
    "number": wrong_number("verify"),
    "number of prefill": wrong_number("prefill"),
    "weight": wrong_weight,
}


@pytest.mark.sweep(2)
@pytest.mark.parametrize("fault", [*FAULTS, "foreign", "no object"])
def test_a_wrong_artefact_gives_a_full_start(fault, tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(ArtefactCache, "said", set())
    cache = tmp_path / "cache"
    is_hit(cache)
    if fault == "foreign":
        foreign(cache)
    elif fault == "no object":
        ArtefactCache(cache).write(entry(cache)[1], ITEM, b"[1, 2")
    else:
        change_content(cache, FAULTS[fault])
    assert not is_hit(cache)
    assert len(warnings()) == 1
    assert is_hit(cache) and len(warnings()) == 1


def test_a_changed_function_that_the_key_does_not_see_is_refused(tmp_path, monkeypatch, warnings):
    assert not is_hit(tmp_path)
    monkeypatch.setattr(captures, "GRAPHS", {})
    right = torch.rsqrt
    monkeypatch.setattr(torch, "rsqrt", lambda x: right(x) * 1.1)
    assert not is_hit(tmp_path)
    (line,) = warnings()
    assert "an artefact differs from the model's own forward" in line
    assert is_hit(tmp_path) and len(ArtefactCache(tmp_path).entries()) == 1


def test_a_cache_that_cannot_be_used_changes_nothing(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    assert not is_hit(tmp_path / "file") and not is_hit(tmp_path / "file")
    monkeypatch.setenv("SPEC_COMPILE_CACHE", str(tmp_path / "off"))
    assert not is_hit("off") and not (tmp_path / "off").exists()
    fast = speculate(model_of("llama"), compile=False)
    assert not fast.speculation.is_from_artefact and len(ArtefactCache().entries()) == 1


def with_hook(folder):
    model = model_of("llama")
    model.model.layers[1].register_forward_hook(lambda module, inputs, output: None)
    return model


LACKING = {
    "it has hooks that may change values": with_hook,
    "it is quantised": lambda folder: quantised_models.load("fp8_block", folder),
}


@pytest.mark.parametrize("reason", LACKING)
def test_models_without_an_artefact(reason, tmp_path):
    fast = speculate(LACKING[reason](tmp_path / "model"), compile=False, cache=tmp_path / "cache")
    assert not fast.speculation.is_from_artefact and not ArtefactCache(tmp_path / "cache").entries()
    with pytest.raises(ValueError, match=reason):
        fast.speculation.save(tmp_path)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rounded_weights(name, dtype, tmp_path, warnings):
    """Graphs from an artefact read the packed weights of the model, which are merged in place."""
    sizes = dict(models.BASE, num_attention_heads=1, num_key_value_heads=1, head_dim=64, intermediate_size=128)
    answers = []
    for is_second in (False, True):
        model = models.build("LlamaConfig", "LlamaForCausalLM", sizes).to(dtype)
        fast = speculate(model, weights=name, compile=False, cache=tmp_path)
        assert fast.speculation.is_from_artefact == is_second
        answers.append(answer(fast))
        own = {tensor.untyped_storage().data_ptr() for tensor in model.buffers()}
        read = [tensor for tensor in fast.speculation.engine.runtime.verify.gm.buffers() if tensor.dtype != dtype]
        assert read and all(tensor.untyped_storage().data_ptr() in own for tensor in read if tensor.nbytes > 4096)
    assert answers[0] == answers[1] and not warnings()


@pytest.mark.parametrize("name", ["ct", "ct int8", "table"])
def test_packed_layers_of_our_own_class(name, tmp_path, warnings):
    """Such as `load_gguf` makes."""
    for is_second in (False, True):
        assert is_hit(tmp_path, packed(model_of("llama"), name)) == is_second
    assert not any("artefact" in line for line in warnings())


def test_weights_that_are_read_where_they_lie_stay_there(tmp_path):
    """A start from an artefact joins no weights of a model whose graphs of merge_linears=False are still there."""
    is_hit(tmp_path)
    is_hit(tmp_path, merge_linears=False)
    model = model_of("llama")
    apart = speculate(model, compile=False, cache=tmp_path, merge_linears=False)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    merging = speculate(model, compile=False, cache=tmp_path)
    assert apart.speculation.is_from_artefact and not merging.speculation.is_from_artefact
    assert places == [parameter.data_ptr() for parameter in model.parameters()]
    assert answer(apart) == answer(merging) == answer(model)


def test_saved_artefacts_are_carried(tmp_path, warnings):
    folder, cache = tmp_path / "folder", tmp_path / "cache"
    with pytest.raises(ValueError, match="artefact: expected a folder that"):
        started("llama", cache, artefact=folder)
    started("llama", cache).speculation.save(folder)
    (cache / "file").write_text("")
    assert is_hit("off", artefact=folder) and is_hit(cache, artefact=str(folder)) and not warnings()
    assert not is_hit(cache, "experts", artefact=folder)
    assert len(warnings()) == 1 and "nothing in" in warnings()[0]
    with pytest.raises(ValueError, match="cache=False"):
        started("llama", "off").speculation.save(folder)
    with pytest.raises(OSError, match="cannot be written"):
        started("llama", cache).speculation.save(tmp_path / "cache" / "file")
    for name, value in (("cache", 3), ("artefact", True)):
        with pytest.raises(TypeError, match=f"{name}: expected"):
            speculate(model_of("llama"), **{name: value})


class Planted:
    """A pickle that leaves a mark where it is loaded."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def read_parts(folder, trusts=False):
    """What a start would load from a folder that was carried here."""
    carried = ArtefactCache(folder, is_carried=True)
    return StoredParts([carried], ArtefactCache(False), "a" * 64, trusts).read("part")


def test_compiled_code_is_loaded_if_this_user_wrote_it(tmp_path, warnings, monkeypatch):
    monkeypatch.setattr(ArtefactCache, "said", set())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    folder, data = tmp_path / "folder", pickle.dumps(Planted(tmp_path / "mark"))
    StoredParts([], ArtefactCache(folder), "a" * 64).write("part", data)
    assert read_parts(folder) == data and os.stat(tmp_path / "mine/spec_compile/secret").st_mode & 0o777 == 0o600
    whole = ArtefactCache(folder).read("a" * 64, "part.part")
    for changed in (data, bytes(32) + data, whole + b"x", whole[:31], b""):
        ArtefactCache(folder).write("a" * 64, "part.part", changed)
        assert read_parts(folder) is None
    ArtefactCache(folder).write("a" * 64, "part.part", whole)
    ArtefactCache(folder).write("b" * 64, "part.part", whole)  # signed for another key
    assert StoredParts([ArtefactCache(folder)], ArtefactCache(False), "b" * 64).read("part") is None
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "theirs"))
    assert read_parts(folder) is None and read_parts(folder, trusts=True) == data
    assert (
        StoredParts([ArtefactCache(folder)], ArtefactCache(False), "a" * 64, True).read("part") is None
    )  # a cache is not carried
    (line,) = warnings()
    assert "trust_artefact=True" in line and not (tmp_path / "mark").exists()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files to another user")
@pytest.mark.parametrize("which", ["folder", "file"])
def test_compiled_code_of_another_user_is_not_loaded_even_if_trusted(which, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    folder = tmp_path / "folder"
    StoredParts([], ArtefactCache(folder), "a" * 64).write("part", b"data")
    os.chown(folder if which == "folder" else folder / ("a" * 64) / "part.part", 65534, -1)
    assert read_parts(folder) is read_parts(folder, trusts=True) is None


def test_a_secret_that_others_may_know_signs_nothing(tmp_path, warnings, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "spec_compile").mkdir(mode=0o700)
    (tmp_path / "spec_compile/secret").write_bytes(bytes(32))
    (tmp_path / "spec_compile/secret").chmod(0o644)
    assert user_secret(tmp_path / "spec_compile") != bytes(32) and len(warnings()) == 1


def test_graphs_of_others_are_used_and_nothing_of_theirs_runs(tmp_path, warnings):
    """Whoever made the folder: it is named by the user, and graphs are data that are checked."""
    folder = tmp_path / "folder"
    started("llama", tmp_path / "cache").speculation.save(folder)
    for path in (folder, *folder.rglob("*")):
        os.chmod(path, 0o777)
        if os.getuid() == 0:
            os.chown(path, 65534, 65534)
    fast = started("llama", "off", artefact=folder, trust_artefact=True)
    assert fast.speculation.is_from_artefact and is_hit("off", artefact=folder) and not warnings()
    assert identity(fast) == identity(started("llama", "off"))  # so the same parts are found
    os.mkfifo(next(folder.iterdir()) / "fifo")
    store, key = ArtefactCache(folder, is_carried=True), next(folder.iterdir()).name
    assert store.read(key, "fifo") is None  # and does not wait for a writer


@pytest.mark.parametrize("row", [["aten.from_file.default", ["marks", True, 4], {}], ["aten.zero_.default", 0, {}]])
def test_a_graph_that_would_write_is_refused_by_name(row, tmp_path, warnings, monkeypatch):
    monkeypatch.chdir(tmp_path)
    is_hit(tmp_path / "cache")

    def change(content):
        graph = content["graphs"]["verify"]
        row[1] = row[1] or [{"tensor": next(iter(graph["tensors"]))}]
        inputs = sum(not name for name, *_ in graph["rows"])
        graph["rows"].insert(inputs, row)

    change_content(tmp_path / "cache", change)
    model = model_of("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    fast = speculate(model, compile=False, cache=str(tmp_path / "cache"))
    (line,) = warnings()
    assert not fast.speculation.is_from_artefact and row[0].rpartition(".")[0] in line
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.slow
def test_a_carried_folder_stays_as_it_is(tmp_path):
    folder = tmp_path / "folder"
    started("llama", tmp_path / "cache").speculation.save(folder)
    files = sorted(folder.rglob("*"))
    assert not is_hit("off", "head", artefact=folder) and sorted(folder.rglob("*")) == files


def test_reports_of_a_start_from_an_artefact(tmp_path):
    texts, graphs = [], []
    for is_second in (False, True):
        fast = started("llama", tmp_path)
        speculation = fast.speculation
        assert speculation.is_from_artefact == is_second
        assert {"capture", "save"} <= speculation.seconds.keys() or is_second
        first, started_by, *rest = speculation.explain().splitlines()
        assert ("from an artefact" in started_by) == is_second
        texts.append([first, *rest])
        files = spec_compile.dump(fast, tmp_path / str(is_second))
        graphs.append([(file.name, file.read_text()) for file in files])
    assert texts[0] == texts[1] and graphs[0] == graphs[1]
