"""scripts/strain_table.py on a tiny model: a row per format, side and change, below the limit as long as nothing is scaled."""

import strain_table
from tiny_models import make_model
from tiny_tokenizer import make_tokenizer

from kv_hf.texts import load_text


def test_strain_table_prints_each_format_and_change(tmp_path, capsys):
    make_model("llama", vocab_size=400).save_pretrained(tmp_path)
    make_tokenizer(400).save_pretrained(tmp_path)
    text = tmp_path / "text.txt"
    text.write_text(load_text("lincoln_1863"))
    formats = ["--formats", "int8", "int4"]
    strain_table.main(["--model", str(tmp_path), "--text", str(text), "--tokens", "200", *formats])
    lines = capsys.readouterr().out.splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert len(rows) == 2 * (2 + 4)
    for what, limit, change, _, _, most, small in rows:
        if change == "as it is":
            assert float(most) < float(limit) and float(small) == 1
        if change == "channel 5 x100" or (what, change) == ("int8 keys", "RoPE pair x50"):
            assert float(most) > float(limit)
