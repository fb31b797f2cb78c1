"""Which pictures a server reads: addresses, files, bytes, pixels and time."""

import asyncio
import base64
import io
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import picture_models
import pytest
import torch
from fastapi import HTTPException
from server_fixtures import CHATS, COUNT, MESSAGES, RESPONSES, ask, body, refusal, running, user, wait_until
from transformers import AutoModelForImageTextToText, AutoProcessor

from spec_compile.serve import media
from spec_compile.serve.media import Media, address_of, check_pixels, find_pictures, is_public

PATH = "messages[0].content[0].image_url"


def refused(call, *args):
    """The refusal of a call."""
    with pytest.raises(HTTPException) as error:
        call(*args)
    assert error.value.detail.startswith(PATH) and error.value.param == "messages"
    return error.value


def read(reader, address, most=1 << 20):
    """The bytes at an address that is not one of http."""
    return asyncio.run(reader._read(PATH, address, most))


def data_address(data, kind="image/png"):
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


# Addresses

NEVER = [
    "/etc/passwd", "etc/passwd", "./a.png", "~/a.png", "C:\\a.png", "file:/etc/passwd", "file://etc/passwd", "",
    "file://localhost/etc/passwd", "FILE:///etc/passwd", "ftp://images.example/a.png", "gopher://images.example/",
    "//images.example/a.png", "http:/images.example", "http:///a.png", "https://images.example.evil.org/",
    "https://evil.org/images.example", "https://evil.org#images.example", "https://user@images.example/a.png",
    "https://images.example@evil.org/", "https://images.example\\@evil.org/", "https://images.example./a.png",
    "https://images.example:22/", "https://images.example:0443x/", "https://2130706433/", "https://0x7f000001/",
    "https://127.1/", "https://0177.0.0.1/", "https://127.0.0.1/", "http://[::1]/", "http://[::ffff:127.0.0.1]/",
    "http://0/", "http://localhost/", "https://images.example/a\r\nHost: b", "https://images.example/\x00",
    " https://images.example/", "https://images.example/ a", "https://images.\uff45xample/", "javascript:a", "data:,a",
    "data:text/html,a", "data:image/png,a", "blob:a", "iVBORw0KGgo=", "https://cdn.example/", "/proc/self/environ",
]  # fmt: skip


@pytest.mark.parametrize("address", NEVER)
def test_addresses_that_are_never_read(address, tmp_path):
    for reader in (Media(), Media(["images.example", "cdn.example:8443"], tmp_path)):
        assert refused(reader.check, PATH, address).status_code == 400


def test_addresses_that_are_read(tmp_path):
    reader = Media(["images.example", "CDN.example:8443"], tmp_path)
    for address in (
        "https://images.example/a.png?b=c@d", "http://IMAGES.example", "https://images.example:443/",
        "https://cdn.example:8443/a", f"file://{tmp_path}/a.png", "data:;base64,YQ==", "data:image/png;base64,YQ==",
        "DATA:image/gif;base64,", "data:image/svg+xml;charset=utf-8;base64,YQ==",
    ):  # fmt: skip
        reader.check(PATH, address)
        if not address.lower().startswith("data:"):
            refused(Media().check, PATH, address)


@pytest.mark.parametrize("address", [
    "127.0.0.1", "127.255.0.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
    "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "::1", "::", "fe80::1", "fe80::1%eth0",
    "fc00::1", "fd00:ec2::254", "ff02::1", "::ffff:127.0.0.1", "::ffff:8.8.8.8", "::ffff:169.254.169.254",
    "2002:7f00:1::", "64:ff9b::7f00:1", "2001::1", "fec0::1", "2001:db8::1", "::127.0.0.1",
])  # fmt: skip
def test_ip_addresses_to_which_nothing_connects(address):
    assert not is_public(address)
    assert is_public("93.184.216.34") and is_public("2606:2800:220:1::1")


def test_settings_are_checked(tmp_path):
    file = tmp_path / "a"
    file.touch()
    for arguments, name in (
        ((["https://images.example"],), "allowed_media_domains"), ((["*"],), "allowed_media_domains"),
        (([], tmp_path / "none"), "allowed_local_media_path"), (([], file), "allowed_local_media_path"),
        (([], None, {"video": 1}), "limit_mm_per_prompt"), (([], None, {"image": -1}), "limit_mm_per_prompt"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=name):
            Media(*arguments)


# Bytes


def test_files_below_the_folder(tmp_path):
    """Others get one refusal, whether they are there or not."""
    folder, outside = tmp_path / "pictures", tmp_path / "pictures_secret"
    for each in (folder, folder / "deep", outside):
        each.mkdir()
    (folder / "deep" / "a b.png").write_bytes(b"abc")
    (outside / "b.png").write_bytes(b"no")
    (folder / "out.png").symlink_to(outside / "b.png")
    (folder / "outside").symlink_to(outside)
    (folder / "in.png").symlink_to(folder / "deep" / "a b.png")
    os.mkfifo(folder / "fifo")
    reader = Media(folder=folder)
    assert read(reader, f"file://{folder}/deep/a%20b.png") == read(reader, f"file://{folder}/in.png") == b"abc"
    assert refused(read, reader, f"file://{folder}/in.png", 2).status_code == 413
    names = "none", "out.png", "outside/b.png", "outside/none", "fifo", "deep", "in.png/a", "a" * 300
    assert len({refused(read, reader, f"file://{folder}/{name}").detail for name in names}) == 1
    names = "../pictures_secret/b.png", "%2e%2e/none", "", "a%00", "%2e%2e/pictures_secret/b.png"
    names = *(f"{folder}/{name}" for name in names), f"{outside}/b.png", f"{outside}/none", "/etc/passwd", "/none"
    assert len({refused(reader.check, PATH, f"file://{name}").detail for name in names}) == 1
    through = tmp_path / "link"
    through.symlink_to(folder)
    assert read(Media(folder=through), f"file://{through}/in.png") == b"abc"


def test_data_is_bounded(monkeypatch):
    def parts(size, count):
        return [(PATH, {"image_url": data_address(bytes(size))}) for _ in range(count)]

    reader = Media()
    assert read(reader, "data:image/png;base64,YWJj\n ZA==") == b"abcd"
    for address in ("data:image/png;base64,####", "data:image/png;base64,YWJ", "data:image/png;base64,\u00e9"):
        assert refused(read, reader, address).status_code == 400
    assert refused(read, reader, data_address(bytes(1000)), 900).status_code == 413
    assert refused(asyncio.run, Media(limits={"image": 2}).load(parts(1, 3))).status_code == 400
    monkeypatch.setattr(media, "MOST_BYTES_OF_ALL", 100)
    assert refused(asyncio.run, reader.load(parts(60, 2))).status_code == 413


def test_pixels_are_bounded():
    assert check_pixels(PATH, 4096, 4096, 0) == 1 << 24 and check_pixels(PATH, 1, 50, 7) == 57
    for width, height, before, status in (
        (8000, 8000, 0, 413), (4097, 4096, 0, 413), (4096, 4096, (1 << 24) + 1, 413), (1, 51, 0, 400), (0, 1, 0, 400),
    ):  # fmt: skip
        assert refused(check_pixels, PATH, width, height, before).status_code == status


# Fetching


class Website(BaseHTTPRequestHandler):
    """Pages by their paths."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Host"]))
        page = self.path.strip("/").split("/")
        if page[0] == "silent":
            self.server.release.wait(10)
            return
        self.send_response(302 if page[0] == "to" else 404 if page[0] == "none" else 200)
        if page[0] == "to":
            self.send_header("Location", base64.urlsafe_b64decode(page[1]).decode())
        if page[0] == "gzip":
            self.send_header("Content-Encoding", "gzip")
        self.end_headers()
        try:
            for _ in range(10_000 if page[0] == "long" else 1):
                self.wfile.write(b"abc" * 1000)
        except OSError:
            self.server.asked.append("left")

    def log_message(self, *args):
        pass


@pytest.fixture
def site(monkeypatch):
    """A website, `images.example`, whose address counts as one of the internet."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Website)
    server.asked, server.release, server.daemon_threads = [], threading.Event(), True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    server.at = f"images.example:{server.server_port}"
    server.found = [["127.0.0.1"]]  # answers of the resolver, the last one for ever

    def resolve(host, port, **options):
        answer = server.found.pop(0) if len(server.found) > 1 else server.found[0]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, port)) for address in answer]

    monkeypatch.setattr(media, "socket", SimpleNamespace(getaddrinfo=resolve, SOCK_STREAM=socket.SOCK_STREAM))
    monkeypatch.setattr(media, "is_public", lambda address: address == "127.0.0.1" or is_public(address))
    yield server
    server.release.set()
    server.shutdown()
    server.server_close()


def fetch(reader, address, most=1 << 20):
    """What `_fetch` returns."""
    return asyncio.run(reader._fetch(PATH, address, most))


def redirection(site, to):
    return f"http://{site.at}/to/{base64.urlsafe_b64encode(to.encode()).decode()}"


def test_allowed_hosts_are_fetched(site):
    reader = Media([site.at])
    assert fetch(reader, f"http://{site.at}/a?b=c") == fetch(reader, redirection(site, "/a")) == b"abc" * 1000
    assert site.asked[0] == ("/a?b=c", site.at)
    assert 5000 < len(fetch(reader, f"http://{site.at}/long", 5000)) < 100_000  # the caller refuses it
    wait_until(lambda: "left" in site.asked)
    for page in ("none", "gzip"):
        assert fetch(reader, f"http://{site.at}/{page}").status_code == 400


def test_redirections_are_checked(site):
    reader = Media([site.at, "other.example"])
    loop = f"http://{site.at}/to/"
    for to in (
        "http://evil.example/", "file:///etc/passwd", "//evil.example/", "ftp://x/", f"http://a@{site.at}/", "/\\evil",
        f"http://127.0.0.1:{site.server_port}/",
    ):  # fmt: skip
        assert fetch(reader, redirection(site, to)).status_code == 400
    assert len(site.asked) == 7
    for _ in range(4):
        loop = redirection(site, loop)
    assert "redirections" in fetch(reader, loop).detail


def test_names_are_resolved_once_and_checked(site):
    """A name with a second address within the network, and one that leads there later, after a redirection too."""
    reader = Media([site.at])
    for found in ([["127.0.0.1", "10.0.0.1"]], [["169.254.169.254"]], [["::ffff:127.0.0.1"]], [[]]):
        site.found = found
        assert "not allowed" in fetch(reader, f"http://{site.at}/a").detail
    assert site.asked == []
    site.found = [["127.0.0.1"], ["10.0.0.1"]]
    assert isinstance(fetch(reader, f"http://{site.at}/a"), bytes) and len(site.found) == 1
    site.found = [["127.0.0.1"], ["10.0.0.1"]]
    assert "not allowed" in fetch(reader, redirection(site, "/a")).detail


def test_a_silent_host_has_a_deadline(site, monkeypatch):
    monkeypatch.setattr(media, "FETCH_SECONDS", 0.2)
    reader = Media([site.at])
    assert "0.2 seconds" in fetch(reader, f"http://{site.at}/silent").detail and reader._fetching == 0


def test_fetches_are_bounded(site, monkeypatch):
    monkeypatch.setattr(media, "MOST_FETCHES", 2)
    reader = Media([site.at])

    async def several():
        waiting = [asyncio.create_task(reader._fetch(PATH, f"http://{site.at}/silent", 9)) for _ in range(2)]
        await asyncio.sleep(0)
        third = await reader._fetch(PATH, f"http://{site.at}/a", 9)
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
        return third, await reader._fetch(PATH, f"http://{site.at}/a", 9)

    third, later = asyncio.run(several())
    assert (third.status_code, third.code) == (429, "media_queue_full") and isinstance(later, bytes)


def test_processed_pictures_that_wait_are_bounded(monkeypatch):
    monkeypatch.setattr(media, "MOST_HELD", 100)
    reader, tensor = Media(), torch.zeros(20)
    reader.hold("a", [tensor, tensor], ["a"])  # one is always taken
    reader.hold("b", ["text"], ["a", "b"])
    with pytest.raises(HTTPException) as error:
        reader.hold("c", [tensor], ["a", "c"])
    assert error.value.status_code == 429
    reader.hold("c", [tensor], ["c"])


# Over HTTP


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    pytest.importorskip("PIL", reason="pictures need Pillow")
    folder = picture_models.save_served(tmp_path_factory.mktemp("model"))
    with running(folder) as client:
        client.folder = folder
        yield client


def picture(width, height, kind="PNG", mode="RGB"):
    """A picture of one colour as a data: address."""
    from PIL import Image

    file = io.BytesIO()
    Image.new(mode, (width, height), 1 if mode == "1" else (9, 120, 200)).save(file, kind)
    return data_address(file.getvalue(), f"image/{kind.lower()}")


def bodies(address):
    """A request of each route and form with a picture at this address."""
    url, plain = {"type": "image_url", "image_url": {"url": address}}, {"type": "input_image", "image_url": address}
    yield CHATS, body(CHATS, [url, {"type": "text", "text": "a"}])
    yield CHATS, body(CHATS, [plain])
    yield CHATS, body(CHATS, messages=[*user("a"), {"role": "tool", "content": [url]}])
    yield "/tokenize", {"messages": user([url])}
    for items in (
        [plain],
        user([plain]),
        [*user("a"), {"type": "function_call_output", "call_id": "1", "output": [plain]}],
    ):
        yield RESPONSES, body(RESPONSES, items)
    source = {"type": "url", "url": address}
    if address.startswith("data:image/png;base64,"):
        source = {"type": "base64", "media_type": "image/png", "data": address.partition(",")[2]}
    yield MESSAGES, body(MESSAGES, [{"type": "image", "source": source}])
    yield COUNT, {"messages": user([{"type": "image", "source": source}])}


def test_pictures_as_data_are_read(served):
    others = [next(bodies(picture(20, 30, kind))) for kind in ("JPEG", "WEBP", "GIF", "BMP")]
    for route, fields in (*bodies(picture(20, 30)), *others):
        response = served.post(route, json=fields)
        assert response.status_code == 200, response.text


def test_pictures_have_transformers_answers(served):
    """Also next to texts that look like pictures."""
    processor = AutoProcessor.from_pretrained(served.folder)
    model = AutoModelForImageTextToText.from_pretrained(served.folder, dtype="float32")
    address, other = picture(20, 30), picture(31, 17, "JPEG")
    for text in ("he", "he <image> <|im_end|>"):
        said = text.replace("<image>", "@").replace("<|im_end|>", "@")
        pictures = [{"type": "image", "url": address}, {"type": "text", "text": "a"}, {"type": "image", "url": other}]
        inputs = processor.apply_chat_template(
            user([*pictures, {"type": "text", "text": said}]), add_generation_prompt=True, tokenize=True,
            return_dict=True, return_tensors="pt",
        )  # fmt: skip
        output = model.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        parts = [
            {"type": "image_url", "image_url": {"url": part["url"]}} if "url" in part else part for part in pictures
        ]
        parts.append({"type": "text", "text": text})
        tokens = served.post("/tokenize", json={"messages": user(parts)}).json()["tokens"]
        assert tokens.count(processor.image_token_id) == 32
        answer = ask(served, CHATS, parts, 8, temperature=0)
        if text == "he":
            assert tokens == inputs["input_ids"][0].tolist()
            assert answer.text == processor.decode(output, skip_special_tokens=True)


@pytest.mark.parametrize(
    "address", ["/etc/passwd", "/none", "file:///etc/passwd", "http://127.0.0.1:9/", "iVBORw0KGgo="]
)
def test_no_route_reads_other_addresses(served, address):
    told = set()
    for route, fields in bodies(address):
        response = served.post(route, json=fields)
        assert response.status_code == 400 and "this server reads no other address" in response.text
        told.add(response.text.replace(address, ""))
    assert "passwd" not in str(told) and "xist" not in str(told)


def test_videos_and_sound_are_refused(served):
    for part in (
        {"type": "video_url", "video_url": {"url": "/etc/passwd"}}, {"type": "audio_url", "audio_url": {"url": "/a"}},
        {"type": "input_audio", "input_audio": {"data": "/etc/passwd"}}, {"type": "image", "url": "/etc/passwd"},
        {"type": "image", "path": "/etc/passwd"}, {"type": "video", "video": "/a"},
        {"type": "audio", "audio": "/a"}, {"type": "file", "file": {"file_id": "a"}},
        {"type": "image_url", "image_url": {"url": "data:,", "detail": "high"}}, {"type": "image_url", "path": "/a"},
    ):  # fmt: skip
        assert "messages[0].content[0]" in refusal(served.post(CHATS, json=body(CHATS, [part])), "messages")


def test_large_pictures_are_refused_before_they_are_decoded(served, monkeypatch):
    from PIL import Image

    small = picture(4096, 4096, mode="1")
    large = picture(8000, 8000, mode="1"), picture(20000, 10000, mode="1"), picture(1, 300), picture(5000, 1)
    monkeypatch.setattr(Image.Image, "convert", None)
    for address in large:
        for route, fields in bodies(address):
            assert served.post(route, json=fields).status_code in (400, 413)
    monkeypatch.undo()
    for address, number, status, says in (
        (small, 3, 413, "content[2].image_url"), (picture(1, 1), 17, 400, "16 pictures"),
    ):  # fmt: skip
        parts = [{"type": "image_url", "image_url": {"url": address}}] * number
        assert says in refusal(served.post(CHATS, json=body(CHATS, parts)), "messages", status)


def test_data_of_pictures_does_not_stay(served, monkeypatch):
    """Neither the data nor the picture is kept while the answer is made."""
    _, fields = next(bodies(picture(20, 30)))
    parts = [*find_pictures(fields["messages"], "messages")]
    loaded = asyncio.run(Media().load(parts))
    assert [address_of(part) for _, part in parts] == [*loaded] == ["picture 0"]
    kept, add = [], served.runner.requests._add
    add_and_keep = lambda call, *args, **options: (kept.append(call), add(call, *args, **options))  # noqa: E731
    monkeypatch.setattr(served.runner.requests, "_add", add_and_keep)
    _, fields = next(bodies(picture(20, 30)))
    assert served.post(CHATS, json=fields).status_code == 200
    assert kept[0].pictures == {} and "base64" not in str(kept[0].fields)


@pytest.mark.parametrize(
    "data",
    [lambda good: b"", lambda good: b"a", lambda good: good[:60], lambda good: good[:30] + b"a" + good[30:],
     lambda good: b"%!PS-Adobe-3.0 EPSF-3.0\n", lambda good: b"<svg/>", lambda good: b"BM" + bytes(60)],
    ids=range(7),
)  # fmt: skip
def test_broken_pictures_are_refused(served, data):
    good = base64.b64decode(picture(20, 30).partition(",")[2])
    _, fields = next(bodies(data_address(data(good))))
    assert "content[0].image_url" in refusal(served.post(CHATS, json=fields), "messages")


def test_silent_hosts_stop_nobody(served, site, monkeypatch):
    """Others are prepared meanwhile, and a fetch ends with its client."""
    import httpx

    reader = Media([site.at])
    monkeypatch.setattr(served.runner.requests.policy, "media", reader)
    _, fields = next(bodies(f"http://{site.at}/silent"))

    def ask():
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{served.base_url}{CHATS}", json=fields, timeout=1.0)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    for client in clients:
        client.start()
    wait_until(lambda: len(site.asked) == 4)
    _, other = next(bodies(picture(4, 4)))
    assert served.post(CHATS, json=other).status_code == 200 and reader._fetching == 4
    for client in clients:
        client.join()
    wait_until(lambda: reader._fetching == 0)
