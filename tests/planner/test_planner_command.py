"""`kv-hf memory`: the table, JSON, the lists, and errors that say their reason."""

import json
import os
import sys

import pytest

import kv_hf
import kv_hf_cli
from kv_hf.planner.devices import DEVICES
from kv_hf.planner.fit import MOST_ROWS
from kv_hf.planner.inventory import CachedLayer, Inventory, State
from kv_hf.planner.plan_command import main
from kv_hf.planner.presets import preset_names
from kv_hf.planner.table import describe_layers, plain_table

LLAMA = "llama-3.1-8b"


def table_of(text):
    """Return {cache: {heading: cell}} of a printed plan."""
    found, headings = {}, None
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.split("  ") if cell.strip()]
        if cells[:1] == ["cache"]:
            headings = cells
        elif not cells:
            headings = None if found else headings
        elif headings and len(cells) == len(headings):
            found.setdefault(cells[0], {}).update(zip(headings[1:], cells[1:], strict=True))
    return found


def test_memory_prints_what_the_plan_says(capsys):
    arguments = [LLAMA, "--batch", "8", "--context", "16k", "--device-memory", "80GB"]
    assert kv_hf_cli.main(["memory", *arguments, "--bandwidth", "3.35TB/s"]) == 0
    text = capsys.readouterr().out
    found = kv_hf.plan(
        LLAMA, batch=8, context=16384, device_memory=80 * 10**9, bandwidth=3_350 * 10**9
    )
    table = table_of(text)
    assert list(table) == [row.cache for row in found.rows]
    for row in found.rows:
        cells = table[row.cache]
        assert cells["bytes/token"] == f"{row.bytes_per_token:,.0f}"
        assert cells["ratio"] == f"{row.ratio:,.2f}x"
        assert cells["batch"] == f"{row.fit.batch:,}"
        assert cells["resident"] == f"{row.fit.resident_tokens:,}"
        assert cells["context"].rstrip("*") == f"{row.fit.context:,}"
        assert cells["context"].endswith("*") == (row.fit.context > 131_072)
        if row.decode.outside:
            assert cells["tokens/s"] == "-"
        else:
            speed = float(cells["tokens/s"].replace(",", ""))
            assert speed == pytest.approx(row.tokens_per_second, rel=1e-3)
        assert cells["fits"] == "yes"
    assert table["dynamic"]["cache bytes"] == "16.00 GiB"
    assert "layers: 32 x 8 kv heads of 128" in text
    assert "8.03 B parameters" in text
    assert "* more than the 131,072 positions" in text


def test_memory_prints_no_speed_of_pages_whose_way_is_not_known(capsys):
    arguments = [LLAMA, "--context", "16k", "--bandwidth", "3TB/s"]
    arguments += ["--cache", "paged_int4", "paged_int4:offload=cpu"]
    speeds = []
    for more in ([], ["--host-bandwidth", "64GB/s"]):
        assert main([*arguments, *more]) == 0
        speeds.append([row["tokens/s"] for row in table_of(capsys.readouterr().out).values()])
    (known, *outside), (same, *given) = speeds
    assert outside == ["-"]
    assert known == same
    assert float(known.replace(",", "")) > max(float(one.replace(",", "")) for one in given) > 0


def test_memory_prints_only_what_was_asked_for(capsys):
    assert main([LLAMA, "--cache", "paged_int8", "dynamic", "--cache", "paged_int4:keys=int8"]) == 0
    table = table_of(capsys.readouterr().out)
    assert list(table) == ["paged_int8", "dynamic", "paged_int4:keys=int8"]
    assert set(table["dynamic"]) == {
        "bytes/token",
        "cache bytes",
        "ratio",
        "with weights",
        "read/token",
    }


def test_memory_as_json_is_the_plan(capsys):
    options = ["--device", "h200", "--tensor-parallel", "2", "--dtype", "fp16", "--reserve", "2GiB"]
    assert main([LLAMA, *options, "--weights", "5GB", "--prompt", "4k", "--json"]) == 0
    found = kv_hf.plan(
        LLAMA,
        device="h200",
        tensor_parallel=2,
        dtype="float16",
        reserve="2GiB",
        weights="5GB",
        prompt=4096,
    )
    given = json.loads(capsys.readouterr().out)
    assert given == json.loads(json.dumps(found.as_dict()))
    assert given["weights"] == 25 * 10**8


def test_kv_heads_take_the_place_of_the_models(capsys, tmp_path):
    small = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32,
    }
    path = tmp_path / "config.json"
    path.write_text(json.dumps(small))
    rows = []
    for heads in (["--kv-heads", "8"], ["--kv-heads", "2"], []):
        assert main([str(path), *heads, "--json", "--cache", "dynamic"]) == 0
        rows.append(json.loads(capsys.readouterr().out)["rows"][0])
    assert rows[0]["bytes_per_token"] == rows[2]["bytes_per_token"] == 2 * 2 * 8 * 8 * 2
    assert rows[1]["bytes_per_token"] == rows[0]["bytes_per_token"] / 4


def test_lists(capsys):
    assert main(["--list-presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == list(preset_names())
    assert any(line.startswith(LLAMA) and "32 x 8 kv heads of 128" in line for line in lines)
    assert main(["--list-devices"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if line[0] != " "] == list(DEVICES)
    assert "79.65 GiB    3.35 TB/s  nvidia-smi 81,559 MiB" in "\n".join(lines)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["./llama-3.1-8b.json"], "there is no file or folder"),
        ([LLAMA, "--cache", "paged_int7"], "cache must be one of"),
        ([LLAMA, "--context", "lots"], "context must be"),
        ([LLAMA, "--batch", "0"], "batch must be"),
        ([LLAMA, "--batch", "100000000"], "batch must be at most 1,000,000 rows"),
        ([LLAMA, "--device-memory", "1,5GiB"], "device_memory must be"),
        ([LLAMA, "--device", "h1000"], "did you mean 'h100'"),
        ([LLAMA, "--device-memory", "24G"], "24GiB (1024**3)"),
        ([LLAMA, "--tensor-parallel", "3"], "these do: 1, 2, 4, 8"),
        ([LLAMA, "--kv-heads", "5"], "kv_heads"),
        (["deepseek-v3", "--cache", "paged_int4:max_length=9000"], "max_length"),
    ],
    ids=str,
)
def test_errors_say_their_reason(arguments, words, capsys):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("kv-hf memory: error: ")
    assert words in printed.err


def test_a_reader_that_stops_early_is_no_error(monkeypatch, capsys):
    for arguments in (["--list-presets"], [LLAMA, "--json", "--cache", "dynamic"]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "w") as out, monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", out)
            assert kv_hf_cli.main(["memory", *arguments]) == 0
    assert capsys.readouterr().err == ""


def test_a_large_batch_is_not_said_to_have_no_limit(capsys):
    inventory = Inventory(
        "m", "llama", "bfloat16", (CachedLayer(kv_heads=1, key_dim=1, value_dim=1),)
    )
    given = {"caches": ["dynamic"], "context": 4, "weights": 0}
    for bytes_, batch in ((16 * MOST_ROWS, f"{MOST_ROWS:,}+"), (16 * 50_000, "50,000")):
        plan = kv_hf.plan(inventory, device_memory=bytes_, **given)
        assert table_of(plain_table(plan))["dynamic"]["batch"] == batch


def test_what_fits_has_no_column_where_weights_are_not_known():
    inventory = Inventory(
        "m", "llama", "bfloat16", (CachedLayer(kv_heads=1, key_dim=8, value_dim=8),)
    )
    text = plain_table(kv_hf.plan(inventory, caches=["dynamic"], device="l4"))
    assert "fits" not in table_of(text)["dynamic"]
    assert "context: the largest" not in text
    assert "give weights" in text


def test_a_model_is_asked_for(capsys):
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "--list-presets" in capsys.readouterr().err


def test_weights_that_do_not_fit_are_said_plainly(capsys):
    assert main(["llama-3.1-70b", "--device", "rtx4090", "--cache", "paged_int4"]) == 0
    text = capsys.readouterr().out
    assert "the weights (131.42 GiB) do not fit into 23.99 GiB: no cache does" in text
    row = table_of(text)["paged_int4"]
    assert (row["fits"], row["context"], row["batch"]) == ("no", "0", "0")


@pytest.mark.parametrize(("width", "tables"), [(60, 4), (80, 3), (110, 2), (400, 1)])
def test_plain_table_fits_its_width(width, tables):
    plan = kv_hf.plan(LLAMA, device="h100")
    text = plain_table(plan, width)
    assert sum(line.startswith("cache ") for line in text.splitlines()) == tables
    assert max(map(len, text.splitlines())) <= width
    assert table_of(text) == table_of(plain_table(plan))


@pytest.mark.parametrize(
    "arguments",
    [
        [LLAMA, "--device", "rtx4090", "--context", "32k"],
        ["gemma-3n-e4b", "--cache", "paged_int4:key_group_size=32,value_group_size=32,offload=cpu"],
        ["--list-devices"],
        ["--list-presets"],
    ],
    ids=" ".join,
)
def test_memory_fits_80_columns_in_a_pipe(arguments, monkeypatch, capsys):
    """The README's own command lost figures at 80 columns."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(arguments) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80


def test_layers_are_described_in_words():
    layers = (
        CachedLayer(kv_heads=8, key_dim=128, value_dim=128),
        CachedLayer(kv_heads=1, key_dim=64, value_dim=32, window=4096, readers=3),
        CachedLayer(kv_heads=1, key_dim=512, value_dim=64, latent=True, index_dim=128),
        CachedLayer("LinearAttentionLayer", states=(State((8, 4)), State((2, 3, 5)))),
        CachedLayer("DummyLayer"),
        CachedLayer("DummyLayer"),
    )
    inventory = Inventory("m", "llama", "bfloat16", layers)
    assert describe_layers(inventory) == (
        "1 x 8 kv heads of 128; 1 x 1 kv head of 64 (keys) and 32 (values), window of 4,096, read by 3 layers; "
        "1 x a latent of 512 and a RoPE key of 64, indexer key of 128; 1 x states of 8x4 and 2x3x5; 2 x nothing of its own"
    )


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_has_a_plan(name):
    plan = kv_hf.plan(name, batch=2, caches=["dynamic", "static"], device="h200")
    text = plain_table(plan)
    assert "+" not in table_of(text)["dynamic"]["batch"]
    found = kv_hf.plan(name)
    assert {row.cache for row in found.rows} >= {"dynamic", "static"}
    assert found.inventory.parameters
    json.dumps(found.as_dict())
    layers = plan.inventory.layers
    if all(layer.readers == 1 for layer in layers):
        # a step reads what is there: a window's newest token is gone behind it, and layers count a number or two
        newest = 2 * 2 * sum(layer.elements for layer in layers if layer.window is not None)
        for row in plan.rows:
            assert -16 * len(layers) <= row.decode.cache - row.total <= newest
