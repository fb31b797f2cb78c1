"""Models that accelerate has offloaded in several ways, and their answers."""

from pathlib import Path

import accelerate
import models
import torch
from transformers import AutoModelForCausalLM

CPU = torch.device("cpu")
QUICK = dict(compile=False, check=False)
PARTS = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")


def llama(tied=False):
    config, cls, kwargs, *rest = models._ADMITTED["llama"]
    return models.build(config, cls, dict(kwargs, tie_word_embeddings=tied), *rest)


def device_map(layers, ends):
    return dict.fromkeys(PARTS, ends) | {f"model.layers.{number}": place for number, place in enumerate(layers)}


def from_pretrained(net, folder, **options):
    net.save_pretrained(folder / "model")
    return AutoModelForCausalLM.from_pretrained(folder / "model", offload_folder=folder / "offloaded", **options).eval()


def dispatched(net, folder, layers=("cpu", "disk"), ends="cpu"):
    return accelerate.dispatch_model(net, device_map(layers, ends), offload_dir=folder / "offloaded")


WAYS = {
    "all in memory": lambda net, folder: accelerate.cpu_offload(net, CPU),
    "all on disk": lambda net, folder: accelerate.disk_offload(net, folder / "offloaded", CPU),
    "a layer": lambda net, folder: accelerate.cpu_offload(net.model.layers[1], CPU) and net,
    "dispatched": dispatched,
    "half loaded": lambda net, folder: from_pretrained(net, folder, device_map=device_map(["cpu", "disk"], "cpu")),
    "loaded, ends on disk": lambda net, folder: from_pretrained(
        net, folder, device_map=device_map(["cpu", "disk"], "disk")
    ),
    "max_memory": lambda net, folder: from_pretrained(net, folder, device_map="auto", max_memory={"cpu": 250_000}),
}


def answer(net, ids, mask=None):
    mask = torch.ones_like(ids) if mask is None else mask
    options = dict(attention_mask=mask, do_sample=False, max_new_tokens=24, eos_token_id=None)
    return net.generate(ids, **options).tolist()


def answers(net):
    """Of a prompt, and of a batch with padding."""
    rows, *batch = models.prompts()
    return answer(net, rows[0]), answer(net, *batch)


def answers_on(net):
    rows, *batch = models.prompts()
    return answer(net, rows[0].cuda()), answer(net, *(each.cuda() for each in batch))


def mapped_file(tensor):
    """The path of the file that is mapped where a tensor lies; "" if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return " ".join(line.split()[5:])
