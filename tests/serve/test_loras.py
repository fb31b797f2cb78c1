"""LoRA adapters over HTTP: models by name, and vLLM's routes to load and unload them."""

import json
import os
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="adapters need peft")

import peft
from lora_models import fill, lora
from server_fixtures import CHATS, COMPLETIONS, PROMPT, ask, body, refusal, running, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile.serve.loras import read_modules
from spec_compile.serve.server import build

NEW = 12
ALL = ["q_proj", "v_proj"]


def save(folder, path, seed, rank, modules=ALL, **options):
    """Save an adapter of the model in `folder`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    model = peft.get_peft_model(model, lora(rank, modules, **options), adapter_name="default")
    fill(model, "default", seed)
    model.save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """The paths of the model and of adapters."""
    root = tmp_path_factory.mktemp("loras")
    folder = save_model(root / "model")
    paths = {name: save(folder, root / name, seed, 4) for seed, name in enumerate(("first", "second", "third"))}
    others = {"large": dict(rank=9), "wide": dict(rank=4, modules=["o_proj"]), "dora": dict(rank=4, use_dora=True)}
    paths |= {name: save(folder, root / name, 0, **options) for name, options in others.items()}
    return paths | {"model": str(folder)}


@pytest.fixture(scope="module")
def client(paths):
    modules = [f"{name}={paths[name]}" for name in ("first", "second")]
    with running(
        paths["model"], slots=4, served_model_name="tiny", lora_modules=modules, allow_runtime_lora_updating=True,
        lora_root=Path(paths["model"]).parent,
    ) as client:  # fmt: skip
        yield client


def expected(paths, adapter):
    """The answer of peft."""
    model = AutoModelForCausalLM.from_pretrained(paths["model"], dtype="float32").eval()
    tokenizer = AutoTokenizer.from_pretrained(paths["model"])
    if adapter is not None:
        model = peft.PeftModel.from_pretrained(model, paths[adapter]).eval()
    inputs = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        ids = model.generate(**inputs, do_sample=False, max_new_tokens=NEW, pad_token_id=0)[0]
    return tokenizer.decode(ids[inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def answer(client, model):
    made = ask(client, COMPLETIONS, PROMPT, NEW, model=model, temperature=0)
    assert made.parts[0]["model"] == model
    return made.text


def load(client, status, **fields):
    """The response to a request to load an adapter."""
    response = client.post("/v1/load_lora_adapter", json=fields)
    assert response.status_code == status, response.text
    return response


def test_models_by_name(client, sdk, paths):
    cards = {card.id: card for card in sdk.models.list().data}
    assert {*cards} == {"tiny", "tiny:first", "tiny:second"}
    card = sdk.models.retrieve("tiny:first")
    assert (card.parent, card.root) == ("tiny", paths["first"]) and not hasattr(cards["tiny"], "parent")
    answers = {name: answer(client, name) for name in ("tiny", "tiny:first", "tiny:second", "second")}
    assert answers["tiny"] == expected(paths, None)
    assert answers["tiny:first"] == expected(paths, "first") != answers["tiny"]
    assert answers["tiny:second"] == answers["second"] == expected(paths, "second") != answers["tiny:first"]
    chats = [ask(client, CHATS, "a mean of values", NEW, model=name).text for name in ("tiny", "tiny:first")]
    assert chats[0] != chats[1]


@pytest.mark.parametrize("name", ["tiny:none", "none", "tiny:", "__base__", "tiny:__base__"])
def test_an_unknown_adapter(client, name):
    reason = refusal(client.post(COMPLETIONS, json=body(COMPLETIONS, model=name)), "model", 404)
    assert f"no model '{name}' here, only 'tiny', 'tiny:first'" in reason


def test_adapters_come_and_go(client, sdk, paths):
    def unload(name, status):
        response = client.post("/v1/unload_lora_adapter", json={"lora_name": name})
        assert response.status_code == status
        return response.text

    stream = sdk.completions.create(model="tiny:second", prompt=PROMPT, max_tokens=200, temperature=0, stream=True)
    begun = next(iter(stream)).choices[0].text
    response = load(client, 200, lora_name="third", lora_path=paths["third"])
    assert response.text == "Success: LoRA adapter 'third' added successfully."
    assert answer(client, "tiny:third") == expected(paths, "third")
    load(client, 400, lora_name="third", lora_path=paths["first"])
    load(client, 200, lora_name="third", lora_path=paths["first"], load_inplace=True)
    assert answer(client, "third") == expected(paths, "first")
    assert unload("third", 200) == "Success: LoRA adapter 'third' removed successfully."
    assert unload("third", 404)
    refusal(client.post(COMPLETIONS, json=body(COMPLETIONS, model="tiny:third")), "model", 404)
    unload("second", 200)  # its stream goes on
    text = begun + "".join(chunk.choices[0].text for chunk in stream)
    assert text.startswith(expected(paths, "second"))
    load(client, 200, lora_name="second", lora_path=paths["second"])


@pytest.mark.parametrize(
    ("name", "path", "field", "reason"),
    [
        ("x", None, "lora_path", "expected a text"),
        ("a.b", "first", "lora_name", "at most 128 letters"),
        ("x", "model", "lora_path", "there is no adapter"),
        ("x", "large", "lora_path", "has rank 9, and slots have room for 4"),
        ("x", "wide", "lora_path", "changes model.layers.0.self_attn.o_proj"),
        ("x", "dora", "lora_path", "use_dora"),
    ],
)
def test_what_cannot_be_loaded(client, paths, name, path, field, reason):
    assert reason in refusal(load(client, 400, lora_name=name, lora_path=paths.get(path)), field)
    assert answer(client, "tiny:first")  # the others are served as before


def copy_of(paths, name, weights=None, **changes):
    """A copy of the first adapter with another configuration, in the folder that clients may load from."""
    folder, first = Path(paths["model"]).parent / name, Path(paths["first"])
    folder.mkdir(exist_ok=True)
    config = json.loads((first / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    weights = (first / "adapter_model.safetensors").read_bytes() if weights is None else weights
    (folder / "adapter_model.safetensors").write_bytes(weights)
    return str(folder)


def large_weights(name="base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight", shape=(1 << 20, 4)):
    header = json.dumps({name: {"dtype": "I8", "shape": shape, "data_offsets": [0, shape[0] * shape[1]]}}).encode()
    return len(header).to_bytes(8, "little") + header + bytes(shape[0] * shape[1])


DAMAGED = {
    "nothing": dict(weights=b"nothing"),
    "a header without end": dict(weights=(1 << 62).to_bytes(8, "little") + b"{}"),
    "another shape": dict(weights=large_weights(shape=(3, 8))),
    "a large matrix": dict(weights=large_weights()),
    "another name": dict(weights=large_weights("lm_head.weight", (3, 8))),
    "a long name": dict(weights=large_weights(f"{'a' * 5000}.lora_A.weight", (3, 8))),
    "a regular expression": dict(target_modules="(.*)*(.*)*(a+)+$"),
    "a list of them": dict(target_modules=["(a+)+$"]),
    "one to exclude": dict(exclude_modules="(.*a){30}"),
    "one of layers": dict(layers_pattern="(.*a){30}", layers_to_transform=[0]),
    "one with a rank": dict(rank_pattern={"(.*a){30}": 4}),
    "one with a scale": dict(alpha_pattern={"(.*a){30}": 4}),
    "many names": dict(target_modules=["q_proj"] * 5000),
    "no rank": dict(r=0),
    "a large rank": dict(r=2**31),
    "a rank of text": dict(r="4"),
    "an endless scale": dict(lora_alpha=1e308),
    "copies of layers": dict(layer_replication=[[0, 4], [2, 5]]),
    "other weights": dict(init_lora_weights="pissa"),
    "another kind": dict(peft_type="PROMPT_TUNING"),
    "embeddings": dict(modules_to_save=["lm_head"]),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_adapter_leaves_nothing(client, sdk, paths, name):
    path = copy_of(paths, "damaged", **DAMAGED[name])
    assert "Error" not in refusal(load(client, 400, lora_name="bad", lora_path=path), "lora_path")
    assert answer(client, "tiny:first") and "tiny:bad" not in {card.id for card in sdk.models.list().data}


def test_code_and_names_of_other_models_in_a_configuration_are_not_read(client, paths):
    mapping, name = {"base_model_class": "system", "parent_library": "os"}, "a" * 128
    changes = dict(auto_mapping=mapping, base_model_name_or_path="/etc/passwd", revision="x", task_type=None)
    copy_of(paths, "mapped", **changes)
    load(client, 200, lora_name=name, lora_path="mapped")
    assert answer(client, f"tiny:{name}") == expected(paths, "first")
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200


def test_paths_elsewhere_say_nothing(client, paths, tmp_path):
    root = Path(paths["model"]).parent
    (tmp_path / "outside").mkdir()
    for file in Path(paths["first"]).iterdir():
        (tmp_path / "outside" / file.name).write_bytes(file.read_bytes())
    (root / "link").symlink_to(tmp_path / "outside")
    (root / "loop").symlink_to(root / "loop")
    (root / "links").mkdir()
    (root / "pipe").mkdir()
    os.mkfifo(root / "pipe" / "adapter_config.json")
    for file in (tmp_path / "outside").iterdir():
        (root / "links" / file.name).symlink_to(file)
    elsewhere = (str(tmp_path / "outside"), "/etc/passwd", "/nowhere", "../outside", "link", "links", "loop", "pipe")
    texts = set()
    for path in (*elsewhere, "", ".", "a\0b", "\u202e", "a" * 5000, "hub/name", "http://127.0.0.1/"):
        texts.add(load(client, 400, lora_name="x", lora_path=path).text)
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["", "a" * 129, "a\0b", "\u202eab", "a b", "a\n", "ä", "../a", "__base__"])
def test_names_are_short_and_plain(client, paths, name):
    refusal(load(client, 400, lora_name=name, lora_path=paths["third"]), "lora_name")
    with pytest.raises(ValueError, match="lora_modules: expected NAME=PATH"):
        read_modules([f"{name}=path"])


def test_updates_are_off_by_default(paths):
    with running(paths["model"], slots=1, lora_modules=[f"first={paths['first']}"]) as client:
        assert client.post("/v1/load_lora_adapter", json={}).status_code == 404


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lora_modules=["first"]), "lora_modules: expected NAME=PATH"),
        (dict(lora_modules=["a=b", "a=c"]), "each NAME once"),
        (dict(lora_modules=["__base__=b"]), "not '__base__'"),
        (dict(allow_runtime_lora_updating=True, lora_root="."), "lora_modules: .*at least one"),
        (dict(allow_runtime_lora_updating=True), "lora_root: .*got None"),
        (dict(allow_runtime_lora_updating=True, lora_root="nowhere"), "lora_root: .*got nowhere"),
        (dict(lora_root="."), "lora_root: with allow_runtime_lora_updating, and only with it"),
        (dict(served_model_name="a" * 5000), "served_model_name: expected a letter"),
        (dict(served_model_name="\u202eab"), "served_model_name: expected a letter"),
        (dict(options={"max_loras": 2}), "lora_modules: .*at least one"),
        (dict(lora_modules=["a=b"], tensor_parallel=2), "leave out tensor_parallel"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("nowhere", device="cpu", **arguments)
    assert read_modules(["a=b=c", "d=e"]) == {"a": "b=c", "d": "e"}
