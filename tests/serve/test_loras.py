"""LoRA adapters over HTTP: models by name, and vLLM's routes to load and unload them."""

import json
import os
from pathlib import Path

import pytest
import torch

for package in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx", "peft"):
    pytest.importorskip(package, reason=f"needs the extra serve, or peft: {package}")

import openai
import peft
from lora_models import fill, lora
from server_fixtures import PROMPT, running, save_model
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


@pytest.fixture(scope="module")
def ai(client):
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0)


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


def answer(ai, model):
    made = ai.completions.create(model=model, prompt=PROMPT, max_tokens=NEW, temperature=0)
    assert made.model == model
    return made.choices[0].text


def test_models_by_name(ai, paths):
    cards = {card.id: card for card in ai.models.list().data}
    assert {*cards} == {"tiny", "tiny:first", "tiny:second"}
    card = ai.models.retrieve("tiny:first")
    assert (card.parent, card.root) == ("tiny", paths["first"]) and not hasattr(cards["tiny"], "parent")
    answers = {name: answer(ai, name) for name in ("tiny", "tiny:first", "tiny:second", "second")}
    assert answers["tiny"] == expected(paths, None)
    assert answers["tiny:first"] == expected(paths, "first") != answers["tiny"]
    assert answers["tiny:second"] == answers["second"] == expected(paths, "second") != answers["tiny:first"]
    chat = dict(messages=[{"role": "user", "content": "a mean of values"}], max_tokens=NEW, temperature=0)
    chats = [ai.chat.completions.create(model=name, **chat) for name in ("tiny", "tiny:first")]
    assert chats[0].choices[0].message.content != chats[1].choices[0].message.content


def test_an_unknown_adapter(ai):
    for name in ("tiny:none", "none", "tiny:", "__base__", "tiny:__base__"):
        with pytest.raises(openai.NotFoundError, match=f"no model '{name}' here, only 'tiny', 'tiny:first'"):
            answer(ai, name)


def test_adapters_come_and_go(client, ai, paths):
    def post(kind, **body):
        return client.post(f"/v1/{kind}_lora_adapter", json=body)

    stream = ai.completions.create(model="tiny:second", prompt=PROMPT, max_tokens=200, temperature=0, stream=True)
    begun = next(iter(stream)).choices[0].text
    response = post("load", lora_name="third", lora_path=paths["third"])
    assert response.status_code == 200 and response.text == "Success: LoRA adapter 'third' added successfully."
    assert answer(ai, "tiny:third") == expected(paths, "third")
    assert post("load", lora_name="third", lora_path=paths["first"]).status_code == 400
    assert post("load", lora_name="third", lora_path=paths["first"], load_inplace=True).status_code == 200
    assert answer(ai, "third") == expected(paths, "first")
    assert post("unload", lora_name="third").text == "Success: LoRA adapter 'third' removed successfully."
    assert post("unload", lora_name="third").status_code == 404
    with pytest.raises(openai.NotFoundError):
        answer(ai, "tiny:third")
    assert post("unload", lora_name="second").status_code == 200  # its stream goes on
    text = begun + "".join(chunk.choices[0].text for chunk in stream)
    assert text.startswith(expected(paths, "second"))
    assert post("load", lora_name="second", lora_path=paths["second"]).status_code == 200


@pytest.mark.parametrize(
    ("body", "field", "reason"),
    [
        ({"lora_name": "x"}, "lora_path", "expected a text"),
        ({"lora_name": "a.b", "lora_path": "first"}, "lora_name", "at most 128 letters"),
        ({"lora_name": "x", "lora_path": "model"}, "lora_path", "there is no adapter"),
        ({"lora_name": "x", "lora_path": "large"}, "lora_path", "has rank 9, and slots have room for 4"),
        ({"lora_name": "x", "lora_path": "wide"}, "lora_path", "changes model.layers.0.self_attn.o_proj"),
        ({"lora_name": "x", "lora_path": "dora"}, "lora_path", "use_dora"),
    ],
)
def test_what_cannot_be_loaded(client, ai, paths, body, field, reason):
    if "lora_path" in body:
        body = body | {"lora_path": paths.get(body["lora_path"], body["lora_path"])}
    response = client.post("/v1/load_lora_adapter", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field) and reason in error["message"], response.text
    assert answer(ai, "tiny:first")  # the others are served as before


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
def test_a_damaged_adapter_leaves_nothing(client, ai, paths, name):
    path = copy_of(paths, "damaged", **DAMAGED[name])
    response = client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": path})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "lora_path" and "Error" not in error["message"], error
    assert answer(ai, "tiny:first") and "tiny:bad" not in {card.id for card in ai.models.list().data}


def test_code_and_names_of_other_models_in_a_configuration_are_not_read(client, ai, paths):
    mapping = {"base_model_class": "system", "parent_library": "os"}
    changes = dict(auto_mapping=mapping, base_model_name_or_path="/etc/passwd", revision="x", task_type=None)
    copy_of(paths, "mapped", **changes)
    body = {"lora_name": "a" * 128, "lora_path": "mapped"}
    assert client.post("/v1/load_lora_adapter", json=body).status_code == 200
    assert answer(ai, "tiny:" + "a" * 128) == expected(paths, "first")
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "a" * 128}).status_code == 200


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
        response = client.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": path})
        assert response.status_code == 400, path
        texts.add(response.text)
    assert len(texts) == 1


@pytest.mark.parametrize("name", ["", "a" * 129, "a\0b", "\u202eab", "a b", "a\n", "ä", "../a", "__base__"])
def test_names_are_short_and_plain(client, paths, name):
    response = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": paths["third"]})
    assert response.status_code == 400 and response.json()["error"]["param"] == "lora_name"
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
