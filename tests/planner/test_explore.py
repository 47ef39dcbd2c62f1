"""The planner's page as a person meets it, in a browser without a network; and the file, the server and the command."""

import json
import os
import re
import signal
import socket
import threading
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import pytest
from headless import FLAGS, find_browser
from paths import ROOT

from kv_hf.errors import CacheOptionError, KVCacheError, UnsupportedModelError
from kv_hf.planner.explore import explore_command, models
from kv_hf.planner.explore.explore_command import main
from kv_hf.planner.explore.models import offered
from kv_hf.planner.explore.page import Model, build_page, kind_of, page_data, policy
from kv_hf.planner.explore.serve import is_own_host, make_server, serve
from kv_hf.planner.inventory import CachedLayer, Inventory, State
from kv_hf.planner.presets import preset_names

EXPLORE = ROOT / "kv_hf" / "planner" / "explore"
CACHES = 3 + len(page_data(offered([]))["caches"])  # transformers' two, the names, the mix


def attention(kv_heads, query_heads, **more):
    return CachedLayer(
        kv_heads=kv_heads, key_dim=128, value_dim=128, query_heads=query_heads, **more
    )


WINDOW = attention(8, 16, cache_class="DynamicSlidingWindowLayer", window=1024)
LATENT = CachedLayer(kv_heads=1, key_dim=512, value_dim=64, latent=True, query_heads=128)
LINEAR = CachedLayer(
    "LinearAttentionLayer", states=(State((4096, 4)), State((32, 128, 128), "float32"))
)
MODELS = [
    Model("llama-3.1-8b", "Llama", Inventory("Llama", "llama", "bfloat16", (attention(8, 32),) * 32, 8_030_261_248, max_positions=131072), "its config"),
    Model("mha", "Old <b>&amp;", Inventory("Old", "llama", "float16", (attention(32, 32),) * 4, 10**9)),
    Model("windows", "Windows", Inventory("Windows", "gemma3_text", "bfloat16", (WINDOW,) * 5 + (attention(8, 16),), 10**9)),
    Model("latents", "Latents", Inventory("Latents", "deepseek_v3", "bfloat16", (LATENT,) * 3, 10**10, 9 * 10**9, 64, 6)),
    Model("hybrid", "Hybrid", Inventory("Hybrid", "qwen3_next", "bfloat16", (LINEAR, attention(2, 16)), 10**9)),
    Model("two-sizes", "Two sizes", Inventory("Two", "gemma4_text", "bfloat16", (attention(8, 16), attention(2, 16)), None)),
]  # fmt: skip


# -- the file ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def text():
    return build_page(MODELS)


class Reader(HTMLParser):
    """What a page would fetch: addresses of elements that load things."""

    def __init__(self, text):
        super().__init__()
        self.addresses, self.ids, self.labels = [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.labels += [found["for"]] if "for" in found else []
        for name in ("src", "href", "srcset", "data", "action", "poster"):
            if found.get(name) and tag != "a":
                self.addresses.append(found[name])


def test_page_fetches_nothing(text):
    reader = Reader(text)
    assert reader.addresses == ["data:,"]
    assert len(reader.ids) == len(set(reader.ids))
    scripts = "".join(
        (EXPLORE / name).read_text()
        for name in os.listdir(EXPLORE)
        if name.endswith((".js", ".css"))
    )
    assert set(re.findall(r"https?://[^\"' ]*", scripts)) == {
        "http://www.w3.org/2000/svg"
    }  # a name, not an address
    assert not re.search(
        r"@import|url\(\s*[\"']?(?!#)\w|fetch\(|XMLHttpRequest|import\(|WebSocket|eval\(", scripts
    )


def test_policy_lets_only_the_pages_own_script_and_style_run(text):
    style = text.split("<style>")[1].split("</style>")[0]
    script = text.split("<script>")[1].split("</script>")[0]
    assert f'content="{policy(script, style)}"' in text
    assert "default-src 'none'" in policy(script, style)
    assert policy(script + " ", style) != policy(script, style)


def test_names_of_models_cannot_end_the_data(text):
    inventory = Inventory("x", "llama", "bfloat16", (attention(8, 32),))
    label = "</script><script>alert(1)</script>"
    page = build_page([Model("x", label, inventory)])
    assert page.count("<script") == text.count("<script") == 2
    assert "{{" not in page
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(found[1])["models"][0]["label"] == label


def test_braces_in_data_are_left_alone():
    inventory = Inventory("x", "llama", "bfloat16", (attention(8, 32),))
    assert "{{script}} {{nothing}}" in build_page([Model("x", "{{script}} {{nothing}}", inventory)])


def test_models_are_sorted_by_their_kind():
    assert [kind_of(model.inventory) for model in MODELS] == [
        "Grouped-query attention", "Multi-head attention", "Sliding windows", "Latents (MLA)",
        "Hybrids with linear attention or convolutions", "Grouped-query attention",
    ]  # fmt: skip
    multi_query = Inventory("x", "falcon", "bfloat16", (attention(1, 71),))
    assert kind_of(multi_query) == "Multi-query attention"


def test_accuracy_is_what_results_say(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "scripts")
    import plan_accuracy

    assert plan_accuracy.page_data() == plan_accuracy.PAGE_DATA.read_text(), (
        "run scripts/plan_accuracy.py"
    )
    rows = json.loads((EXPLORE / "accuracy.json").read_text())["rows"]
    measured = [
        json.loads(line)
        for line in (ROOT / "results" / "accuracy_vs_memory.jsonl").read_text().splitlines()
    ]
    for row in rows:
        assert any(
            one.get("cache") == row["cache"] and one["model"] == row["model"] and one.get("kl_mean") == pytest.approx(row["kl"], rel=1e-5)
            for one in measured
        ), row  # fmt: skip
    assert len({row["model"] for row in rows}) == 3 and len(rows) > 15


def test_package_data_lists_every_file_of_the_page():
    listed = (ROOT / "pyproject.toml").read_text()
    for suffix in {path.suffix for path in EXPLORE.iterdir() if path.is_file()} - {".py"}:
        assert f'"planner/explore/*{suffix}"' in listed


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def few_models(monkeypatch):
    monkeypatch.setattr(explore_command, "offered", lambda own: MODELS)


def test_out_writes_aside_and_renames(few_models, tmp_path, capsys, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")
    real, seen = os.replace, []

    def replace(source, target):
        seen.append((Path(source).read_text()[:15], path.read_text()))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    assert main(["--out", str(path)]) == 0
    assert seen == [("<!doctype html>", "before")]
    assert path.read_text().startswith("<!doctype html>")
    assert str(path) in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [path]
    other = tmp_path / "plain"
    other.write_text("")
    assert path.stat().st_mode == other.stat().st_mode


def test_out_leaves_the_old_page_where_writing_fails(few_models, tmp_path, capsys, monkeypatch):
    path = tmp_path / "page.html"
    path.write_text("before")

    def full(source, target):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", full)
    assert main(["--out", str(path)]) == 2
    assert "no space left" in capsys.readouterr().err
    assert path.read_text() == "before" and list(tmp_path.iterdir()) == [path]


def test_bad_arguments_say_what_is_wrong(few_models, tmp_path, capsys, monkeypatch):
    assert main(["--out", str(tmp_path)]) == 2
    assert "is a folder" in capsys.readouterr().err
    assert main(["--out", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["--port", "8000"]) == 2
    assert "--serve" in capsys.readouterr().err
    assert main(["--serve", "--port", "70000"]) == 2
    assert "0-65535" in capsys.readouterr().err

    def refuse(own):
        raise CacheOptionError("no such model")

    monkeypatch.setattr(explore_command, "offered", refuse)
    assert main(["--out", str(tmp_path / "page.html"), "--model", "x"]) == 2
    assert "no such model" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_own_models_come_first(tmp_path):
    sizes = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
    }
    own = tmp_path / "My model <1>"
    own.mkdir()
    (own / "config.json").write_text(
        json.dumps({"model_type": "llama", "vocab_size": 100, **sizes})
    )
    found = offered([str(own), str(own)])
    assert [model.id for model in found[:2]] == ["My-model-1", "My-model-1-2"]
    assert found[0].inventory.layers[0].kv_heads == 2
    data = page_data(found)
    assert data["defaults"]["model"] == "My-model-1"
    assert [model["group"] for model in data["models"][:3]] == [
        "Given",
        "Given",
        "Grouped-query attention",
    ]
    with pytest.raises(KVCacheError, match="nowhere"):
        offered([str(tmp_path / "nowhere")])


def test_presets_that_cannot_be_planned_here_are_left_out(monkeypatch):
    real = models.inventory_of_preset

    def older(preset):
        if preset["name"] == "llama-2-7b":
            raise UnsupportedModelError("an older transformers")
        return real(preset)

    said = []
    monkeypatch.setattr(models, "inventory_of_preset", older)
    monkeypatch.setattr(models, "say_once", lambda key, text: said.append(text))
    found = [model.id for model in offered([])]
    assert set(preset_names()) - set(found) == {"llama-2-7b"} and len(found) >= 20
    assert said == ["kv_hf: the page does not offer llama-2-7b: an older transformers"]


def test_server_gives_the_page_and_nothing_else(text):
    server = make_server(text, 0)
    assert server.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=serve, args=(server,), daemon=True)
    thread.start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        with pytest.raises(OSError, match="in use"):
            make_server(text, server.server_port)
        with urllib.request.urlopen(f"{address}/?x=1", timeout=10) as answer:
            assert answer.read().decode() == text
            assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
        head = urllib.request.Request(f"{address}/", method="HEAD")
        with urllib.request.urlopen(head, timeout=10) as answer:
            assert answer.read() == b""
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"{address}/../page.py", timeout=10)
    finally:
        server.shutdown()
        thread.join(timeout=10)
    assert not thread.is_alive()


def ask(port, *lines):
    """The status line and the rest of what the server answers to these lines, by a plain socket."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode("latin-1"))
        answer = b""
        while data := connection.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0].decode(), head.decode(), body


@pytest.fixture
def port(text):
    server = make_server(text, 0)
    thread = threading.Thread(target=serve, args=(server,), daemon=True)
    thread.start()
    yield server.server_port
    server.shutdown()
    thread.join(timeout=10)


@pytest.mark.parametrize(
    "host",
    ["evil.example:PORT", "evil.example", "127.0.0.1", "localhost", "127.0.0.1:1", "localhost:", "127.0.0.1:PORT.evil.example",
     "evil.example@127.0.0.1:PORT", "127.0.0.1.evil.example:PORT", "[::1]", "0.0.0.0:PORT", "127.0.0.2:PORT", ""],
)  # fmt: skip
def test_requests_under_a_strangers_name_are_refused(host, port, text):
    """A stranger's page whose name is made to resolve to this machine could read what is served."""
    given = host.replace("PORT", str(port))
    status, _, body = ask(port, "GET / HTTP/1.1", f"Host: {given}", "Connection: close")
    assert " 421 " in status and b"<script" not in body
    assert " 421 " in ask(port, "HEAD / HTTP/1.1", f"Host: {given}", "Connection: close")[0]


def test_requests_of_no_host_or_two_are_refused(port):
    own = f"Host: 127.0.0.1:{port}"
    for lines in (
        ["GET / HTTP/1.0"],
        ["GET / HTTP/1.1", "Connection: close"],
        ["GET / HTTP/1.1", own, "Host: evil.example", "Connection: close"],
        ["GET / HTTP/1.1", "Host: evil.example", own, "Connection: close"],
    ):
        assert " 421 " in ask(port, *lines)[0]
    status, _, _ = ask(port, "GET http://evil.example/ HTTP/1.1", own, "Connection: close")
    assert " 404 " in status
    assert " 501 " in ask(port, "POST / HTTP/1.1", own, "Connection: close")[0]


@pytest.mark.parametrize("name", ["127.0.0.1", "localhost", "LocalHost", "[::1]"])
def test_requests_under_this_machines_own_names_are_answered(name, port, text):
    status, head, body = ask(port, "GET /?a=1 HTTP/1.1", f"Host: {name}:{port}")
    assert " 200 " in status and body.decode() == text
    assert "X-Frame-Options: DENY" in head and "Cross-Origin-Resource-Policy: same-origin" in head


def test_browsers_leave_the_port_80_out():
    assert is_own_host(["localhost"], 80) and is_own_host(["[::1]"], 80)
    assert not is_own_host(["localhost"], 8000) and not is_own_host(["evil.example"], 80)


def test_interrupt_ends_the_server_cleanly(text):
    server = make_server(text, 0)
    interrupt = threading.Timer(0.5, signal.raise_signal, [signal.SIGINT])
    late = threading.Timer(20, server.shutdown)  # a server that goes on fails the test
    interrupt.start()
    late.start()
    serve(server)  # in the main thread, where Ctrl-C arrives; it returns
    assert late.is_alive()
    late.cancel()
    assert server.socket.fileno() == -1


# -- the page in a browser -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def browser():
    path = find_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield found
        found.close()


@pytest.fixture(scope="module")
def address(text, tmp_path_factory):
    file = tmp_path_factory.mktemp("page") / "page.html"
    file.write_text(text)
    return file.as_uri()


@pytest.fixture
def visit(browser, address):
    """Return what opens the page; at the end nothing was fetched and no error said."""
    contexts, wrong = [], []

    def opened(hash_="", **options):
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
        contexts.append(context)

        def route(one):
            if one.request.url.split("#")[0] == address:
                one.continue_()
            else:
                wrong.append(one.request.url)
                one.abort()

        context.route("**/*", route)
        page = context.new_page()
        page.set_default_timeout(10_000)
        page.on(
            "console",
            lambda said: wrong.append(said.text) if said.type in ("error", "warning") else None,
        )
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.goto(address + hash_)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert wrong == []


def figures(page):
    """Return the table's first words of every cell, by cache."""
    rows = page.evaluate(
        "[...document.querySelectorAll('#table tbody tr')].map(row => [...row.children].map(cell => cell.firstChild.textContent))"
    )
    return {row[0]: row[1:] for row in rows}


def hash_of(page):
    return page.evaluate("location.hash")


def test_choosing_a_model_changes_figures_and_the_address(visit):
    page = visit()
    before = figures(page)
    assert before["DynamicCache"][:3] == ["128 KiB", "8.00 GiB", "1.00×"]  # noqa: RUF001
    page.select_option("#f-model", "mha")
    after = figures(page)
    assert after["DynamicCache"][0] == "64.0 KiB"
    assert hash_of(page) == "#model=mha"
    assert page.inner_text("#summary").startswith("Old <b>&amp;, 4 rows of 16,384 tokens")
    page.select_option("#f-model", "latents")
    assert page.is_hidden("#f-keys") and page.is_hidden("#f-kv") and page.is_visible("#f-latent")
    page.select_option("#f-latent", "fp8_ds_mla")
    assert figures(page)["your mix"][0] == "1.92 KiB"  # 3 layers of 656 bytes
    page.click("#reset")
    assert hash_of(page) == "" and figures(page) == before


def test_sliders_go_by_keys_and_by_dragging(visit):
    page = visit()
    page.focus("#s-context")
    page.keyboard.press("ArrowRight")
    assert page.input_value("#f-context") == "18,432"
    assert page.get_attribute("#s-context", "aria-valuetext") == "18,432"
    page.keyboard.press("Home")
    assert page.input_value("#f-context") == "16"
    page.keyboard.press("End")
    assert page.input_value("#f-context") == "1,048,576"
    page.focus("#s-kv")
    page.keyboard.press("ArrowLeft")
    assert page.input_value("#f-kv") == "4" and "kv=4" in hash_of(page)
    box = page.locator("#s-batch").bounding_box()
    page.mouse.move(box["x"] + 5, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    batch = int(page.input_value("#f-batch"))
    assert 8 < batch < 200 and f"batch={batch}" in hash_of(page)
    page.focus("#f-keys input:checked")
    page.keyboard.press("ArrowRight")
    assert page.is_checked("#f-keys input[value=int4]") and "keys=int4" in hash_of(page)


def test_numbers_are_typed_and_bad_ones_are_told(visit):
    page = visit()
    page.fill("#f-context", "8,193")
    assert "context=8193" in hash_of(page)
    good = figures(page)
    for bad in ("", "abc", "0", "-5", "1.5", "99999999999999", "1e3", "Infinity"):
        page.fill("#f-context", bad)
        assert page.get_attribute("#f-context", "aria-invalid") == "true", bad
        assert (
            page.inner_text("#e-context") == "Give a whole number from 1 to 4,194,304. Still 8,193."
        )
        assert figures(page) == good and "context=8193" in hash_of(page)
    page.fill("#f-context", "8193")
    assert page.get_attribute("#f-context", "aria-invalid") is None and page.is_hidden("#e-context")
    page.press("#f-context", "Tab")
    assert page.input_value("#f-context") == "8,193"
    page.fill("#f-kv", "3")
    assert page.inner_text("#e-kv") == "Give one of 1, 2, 4, 8, 16, 32. Still 8."
    page.fill("#f-memory", "80.5")
    assert page.input_value("#f-device") == "own" and "memory=80.5" in hash_of(page)


def test_a_model_of_typed_numbers(visit):
    page = visit()
    page.select_option("#f-model", "custom")

    def give(**numbers):
        for name, value in numbers.items():
            page.fill(f"#f-{name}", str(value))
            page.press(f"#f-{name}", "Enter")

    give(layers=80, heads=64, kvheads=64, dim=128, billions=70, batch=1, context=32768)
    page.check("#exact")
    assert figures(page)["DynamicCache"][:2] == ["2,621,440", "85,899,345,920"]
    # 4 heads on the way to 48 change nothing else
    page.fill("#f-heads", "4")
    assert page.input_value("#f-kvheads") == "64" and page.is_hidden("#notice")
    give(heads=48)
    assert page.input_value(
        "#f-kvheads"
    ) == "48" and "64 kv heads do not divide 48" in page.inner_text("#notice")
    give(kvheads=5)
    assert page.input_value("#f-kvheads") == "4"
    give(window=4096, windowed=100)
    assert page.input_value("#f-windowed") == "80"
    page.select_option("#f-kind", "latent")
    assert page.is_hidden("#f-window") and page.is_visible("#f-rank")
    give(layers=61)
    assert figures(page)["DynamicCache"][0] == "70,272"


def test_figures_too_large_for_exact_numbers_say_so(visit):
    page = visit(
        "#model=custom&layers=1024&heads=1024&kvheads=1024&dim=4096&batch=4096&context=4194304&window=1048576&windowed=3&exact=1"
    )
    assert "Bytes beyond 8 PiB are rounded." in page.inner_text("#table-hint")
    assert page.evaluate("performance.now()") < 60_000


def test_links_restore_everything(visit):
    page = visit()
    page.select_option("#f-model", "windows")
    page.fill("#f-batch", "3")
    page.fill("#f-context", "20001")
    page.fill("#f-kv", "4")
    page.fill("#f-page", "128")
    page.check("#f-keys input[value=int2]", force=True)
    page.check("#f-values input[value=fp8]", force=True)
    page.fill("#f-sinks", "8")
    page.fill("#f-recent", "100")
    page.fill("#f-memory", "31.5")
    page.fill("#f-bandwidth", "777")
    page.fill("#f-tp", "2")
    page.uncheck("#weights")
    page.check("input[name=scale][value=linear]", force=True)
    page.check("#exact")
    state = "new URLSearchParams(location.hash.slice(1)).toString()"
    shown = "[...document.querySelectorAll('input, select')].filter(one => one.name !== 'theme').map(one => [one.id || one.name + one.value, one.type === 'radio' || one.type === 'checkbox' ? one.checked : one.value])"
    again = visit(hash_of(page))
    assert page.evaluate(state).count("=") == 16
    assert again.evaluate(state) == page.evaluate(state)
    page.focus("#share")  # a field that is left shows its number as the page writes it
    assert again.evaluate(shown) == page.evaluate(shown)
    assert figures(again) == figures(page)
    assert again.is_hidden("#notice")


@pytest.mark.parametrize(
    ("hash_", "said", "kept"),
    [
        ("#batch=many&context=4096", "batch=many is not a whole number from 1 to 4,096", {"batch": "4", "context": "4,096"}),
        ("#model=no-such-model", "model=no-such-model is not one of", {"model": "llama-3.1-8b"}),
        ("#tea=1&batch=2", "“tea” is nothing that this page knows", {"batch": "2"}),
        ("#kv=7", "kv=7 is no divisor of 32 query heads", {"kv": "8"}),
        ("#model=two-sizes&kv=4", "kv=4 cannot be chosen for this model", {"model": "two-sizes"}),
        ("#tp=3", "8 kv heads cannot be shared out evenly over 3 devices", {"tp": "1"}),
        ("#context=%E0%A4%A&batch=2", "context=", {"batch": "2"}),
        ("#&&=&batch=2", "nothing that this page knows", {"batch": "2"}),
        ("#keys=<img src=x onerror=alert(1)>", "is not one of exact, fp8", {"batch": "4"}),
        ("#__proto__=1&constructor=2", "nothing that this page knows", {"batch": "4"}),
    ],
)  # fmt: skip
def test_bad_links_fall_back_and_say_so(visit, hash_, said, kept):
    page = visit(hash_)
    assert said in page.inner_text("#notice")
    assert {name: page.input_value(f"#f-{name}") for name in kept} == kept
    assert len(figures(page)) == CACHES
    page.click("#notice button")
    assert page.is_hidden("#notice")


def test_a_link_pasted_into_an_open_page_is_read(visit):
    page = visit()
    page.evaluate("location.hash = '#batch=7&device=h100'")
    page.wait_for_function("document.getElementById('f-batch').value === '7'")
    assert page.input_value("#f-device") == "h100"


def test_formats_that_do_not_fit_say_why(visit):
    page = visit("#model=custom&kvheads=3&heads=3&dim=33&layers=2&billions=0.1&keys=int4")
    found = figures(page)
    assert "not a multiple" in found["paged_int4"][0] and "not a multiple" in found["paged_int2"][0]
    assert found["paged_int8"][0].endswith(
        "bytes"
    ) and "does not go with this model" in page.inner_text("#summary")


def test_a_large_batch_is_not_said_to_have_no_limit(visit):
    small = "#model=custom&kvheads=1&heads=1&dim=16&layers=1&billions=0.001&context=1"
    rows = figures(visit(small + "&device=own&memory=40"))
    assert rows
    assert {cells[4] for cells in rows.values()} == {"65,536+"}


def test_themes(visit):
    ground = "getComputedStyle(document.body).backgroundColor"
    dark, light = visit(color_scheme="dark"), visit(color_scheme="light")
    assert dark.evaluate(ground) != light.evaluate(ground)
    light.focus("#theme input:checked")
    light.keyboard.press("ArrowLeft")  # round to the last: dark
    assert light.evaluate(ground) == dark.evaluate(ground)
    light.reload()
    assert light.evaluate(ground) == dark.evaluate(ground)
    assert "theme" not in hash_of(light)


COLOURS = """() => {
    const probe = document.body.appendChild(document.createElement("i"));
    const canvas = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    return Object.fromEntries(NAMES.map(name => {
        probe.style.color = `var(--${name})`;
        canvas.fillStyle = getComputedStyle(probe).color;
        canvas.fillRect(0, 0, 1, 1);
        return [name, [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)];
    }));
}"""
WORDS = ("text", "soft", "accent", "good", "bad")
SERIES = ("weights", "payload", "scales", "tail", "waste", "other")
LINES = ("dynamic", "static", "exact", "fp8", "int8", "int4", "int2", "mix")
# what people without red, without green and without blue cones see of linear RGB (Machado, Oliveira, Fernandes 2009)
BLIND = {
    "none": ((1, 0, 0), (0, 1, 0), (0, 0, 1)),
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}  # fmt: skip


def linear(colour):
    return [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]


def luminance(colour):
    return sum(
        part * weight for part, weight in zip(linear(colour), (0.2126, 0.7152, 0.0722), strict=True)
    )


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def oklab(rgb):
    r, g, b = (max(0.0, part) for part in rgb)
    l = (0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b) ** (1 / 3)  # noqa: E741
    m = (0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b) ** (1 / 3)
    s = (0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b) ** (1 / 3)
    return (
        0.2104542553 * l + 0.7936177850 * m - 0.0040720468 * s,
        1.9779984951 * l - 2.4285922050 * m + 0.4505937099 * s,
        0.0259040371 * l + 0.7827717662 * m - 0.8086757660 * s,
    )


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_colours_have_contrast_and_can_be_told_apart(visit, scheme):
    page = visit(color_scheme=scheme)
    names = [*WORDS, *SERIES, *LINES, "card", "ground", "raised", "edge", "on-accent", "notice"]
    colours = page.evaluate(COLOURS.replace("NAMES", json.dumps(names)))
    for ground in ("card", "ground", "raised", "notice"):
        for name in ("text", "soft") if ground == "notice" else WORDS:
            assert contrast(colours[name], colours[ground]) >= 4.5, (name, ground)
    assert contrast(colours["on-accent"], colours["accent"]) >= 4.5
    for name in (*SERIES, *LINES, "edge"):
        assert contrast(colours[name], colours["card"]) >= 3, name
    for kind, matrix in BLIND.items():
        seen = {
            name: oklab(
                [
                    sum(w * part for w, part in zip(row, linear(colours[name]), strict=True))
                    for row in matrix
                ]
            )
            for name in SERIES
        }
        for one in SERIES:
            for other in SERIES:
                # room without tokens is striped besides
                if one < other and "waste" not in (one, other):
                    distance = (
                        sum((a - b) ** 2 for a, b in zip(seen[one], seen[other], strict=True))
                        ** 0.5
                    )
                    assert distance >= 0.08, (kind, one, other, distance)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "latents", "custom"])
def test_narrow_pages_do_not_scroll_sideways(visit, model):
    page = visit(f"#model={model}&exact=1", has_touch=True)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    for width in (320, 390, 768, 1024):
        page.set_viewport_size({"width": width, "height": 800})
        page.wait_for_function(f"document.querySelector('#bars svg').clientWidth < {width}")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        small = page.evaluate(
            "[...document.querySelectorAll('svg text')].filter(one => parseFloat(getComputedStyle(one).fontSize) < 11).length"
        )
        assert small == 0


def test_tab_reaches_every_control_in_order_with_a_ring(visit):
    page = visit()
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        found = page.evaluate("""() => {
            const one = document.activeElement;
            if (one === document.body) return null;
            const ring = one.matches(".segmented input") ? one.nextElementSibling : one;
            return [one.id || one.name || one.textContent, getComputedStyle(ring).outlineStyle, one.getBoundingClientRect().height > 0];
        }""")
        if found is None:
            break
        assert found[1] != "none" and found[2], found
        seen.append(found[0])
    order = [
        "Skip to the results", "share", "reset", "theme", "f-model", "f-kv", "s-kv", "f-dtype", "f-context", "s-context", "f-batch",
        "s-batch", "f-page", "s-page", "keys", "values", "f-sinks", "s-sinks", "f-recent", "s-recent", "f-device", "f-memory",
        "s-memory", "f-bandwidth", "s-bandwidth", "f-tp", "s-tp", "weights", "exact", "table", "scale", "read-at",
    ]  # fmt: skip
    assert [name for name in seen if name in order] == order
    page.focus(".skip")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "results" and hash_of(page) == ""


def test_every_control_and_drawing_has_a_name(visit):
    page = visit("#model=custom&kind=latent")
    unnamed = page.evaluate("""() => [...document.querySelectorAll("input, select, button")]
        .filter(one => !(one.labels && one.labels.length) && !one.getAttribute("aria-label") && !one.textContent.trim())
        .map(one => one.outerHTML)""")
    assert unnamed == []
    labels = page.evaluate(
        "[...document.querySelectorAll('.chart svg')].map(one => [one.getAttribute('role'), one.getAttribute('aria-label')])"
    )
    assert len(labels) == 3 and all(role == "img" and len(label) > 40 for role, label in labels)
    for name in ("table", "parts", "curve-table", "accuracy-table"):
        assert page.evaluate(f"document.querySelectorAll('#{name} tbody tr').length") >= 8, name


def test_the_curve_is_read_by_keys_and_by_pointing(visit):
    page = visit()
    assert page.inner_text("#reading") == "At 16,384 tokens per row"
    total = page.inner_text("#curve-legend li:first-child b")
    page.focus("#read-at")
    page.keyboard.press("End")
    assert page.inner_text("#reading") == "At 131,072 tokens per row"
    assert page.inner_text("#curve-legend li:first-child b") != total
    page.hover("#curve svg", position={"x": 64, "y": 100})
    assert page.inner_text("#reading") == "At 128 tokens per row"


@pytest.mark.parametrize("memory", [0.1, 1, 15, 100_000])
@pytest.mark.parametrize("scale", ["log", "linear"])
def test_curves_are_drawn_whatever_fits(visit, scale, memory):
    page = visit(f"#memory={memory}&scale={scale}")
    for _ in range(2):  # with weights, and without
        lines = page.evaluate(
            "[...document.querySelectorAll('#curve polyline')].map(one => one.getAttribute('points'))"
        )
        assert len(lines) == CACHES
        for line in lines:
            places = [tuple(map(float, point.split(","))) for point in line.split()]
            assert places[0][0] < places[-1][0] and places[0][1] >= places[-1][1]
            assert any(20 <= y <= 322 for _, y in places)
        assert "NaN" not in page.inner_html("#bars") + page.inner_html("#curve")
        page.uncheck("#weights")
    assert ("weights alone" in page.inner_text("#bars-hint")) == (memory < 14)


def test_parts_of_the_bars_add_up(visit):
    page = visit("#exact=1&recent=100&batch=300")
    rows = page.evaluate(
        "[...document.querySelectorAll('#parts tbody tr')].map(row => [...row.children].map(cell => cell.textContent.replaceAll(',', '')))"
    )
    for name, *cells in rows:
        numbers = list(map(int, cells))
        assert sum(numbers[:5]) == numbers[6] and numbers[5] <= numbers[6], name
    assert any(int(cells[6]) for cells in rows)


def test_reduced_motion_is_respected(visit):
    moving = "getComputedStyle(document.getElementById('share')).transitionDuration"
    assert visit(reduced_motion="reduce").evaluate(moving) == "0s"
    assert visit(reduced_motion="no-preference").evaluate(moving) != "0s"
