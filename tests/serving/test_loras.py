"""LoRA adapters over HTTP: models by name, and vLLM's routes to load and unload them."""

import pytest
import torch

for package in ("fastapi", "uvicorn", "prometheus_client", "openai", "httpx", "peft"):
    pytest.importorskip(package, reason=f"needs the extra serve, or peft: {package}")

import openai
import peft
from lora_models import fill, lora
from server_fixtures import PROMPT, running, save_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from spec_compile.serving.loras import read_modules
from spec_compile.serving.server import build

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
        paths["model"], slots=4, served_model_name="tiny", lora_modules=modules, allow_runtime_lora_updating=True
    ) as client:
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
        ({"lora_name": "a.b", "lora_path": "first"}, "lora_name", "without dots"),
        ({"lora_name": "x", "lora_path": "model"}, "lora_path", "there is no adapter"),
        ({"lora_name": "x", "lora_path": "large"}, "lora_path", "has rank 9, and slots have room for 4"),
        ({"lora_name": "x", "lora_path": "wide"}, "lora_path", "changes model.layers.0.self_attn.o_proj"),
        ({"lora_name": "x", "lora_path": "dora"}, "lora_path", "use_dora"),
        ({"lora_name": "x", "lora_path": "first", "lora": 1}, "lora", "not served"),
    ],
)
def test_what_cannot_be_loaded(client, ai, paths, body, field, reason):
    if "lora_path" in body:
        body = body | {"lora_path": paths.get(body["lora_path"], body["lora_path"])}
    response = client.post("/v1/load_lora_adapter", json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, field) and reason in error["message"], response.text
    assert answer(ai, "tiny:first")  # the others are served as before


def test_a_damaged_adapter_leaves_nothing(client, ai, paths, tmp_path):
    (tmp_path / "adapter_config.json").write_bytes(open(f"{paths['first']}/adapter_config.json", "rb").read())
    (tmp_path / "adapter_model.safetensors").write_bytes(b"nothing")
    response = client.post("/v1/load_lora_adapter", json={"lora_name": "bad", "lora_path": str(tmp_path)})
    assert response.status_code == 400 and "it cannot be loaded" in response.text
    assert answer(ai, "tiny:first") and "tiny:bad" not in {card.id for card in ai.models.list().data}


def test_updates_are_off_by_default(paths):
    with running(paths["model"], slots=1, lora_modules=[f"first={paths['first']}"]) as client:
        assert client.post("/v1/load_lora_adapter", json={}).status_code == 404


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(lora_modules=["first"]), "lora_modules: expected NAME=PATH"),
        (dict(lora_modules=["a=b", "a=c"]), "each NAME once"),
        (dict(lora_modules=["__base__=b"]), "not '__base__'"),
        (dict(allow_runtime_lora_updating=True), "lora_modules: .*at least one"),
        (dict(options={"max_loras": 2}), "lora_modules: .*at least one"),
        (dict(lora_modules=["a=b"], tensor_parallel=2), "leave out tensor_parallel"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(ValueError, match=message):
        build("nowhere", device="cpu", **arguments)
    assert read_modules(["a=b=c", "d=e"]) == {"a": "b=c", "d": "e"}
