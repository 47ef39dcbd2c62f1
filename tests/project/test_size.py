"""The sizes of the rooms: what counts as code, and who is told of a room that grew."""

import size


def test_add_counts_code_and_no_comments_or_docstrings():
    python = '"""Say what."""\n\nimport os  # why\n\n\ndef f(\n    a,\n):\n    """Say more.\n\n    Much.\n    """\n    return """a\nb"""\n'
    c = "/* what\n   it does */\nint a = 1; // why\n\n#define B (2)\n"
    found = size.Size()
    found.add(python, True)
    assert (found.code, found.files, found.tokens) == (6, 1, 2 + 7 + 2)
    found.add(c, False)
    assert (found.code, found.files, found.tokens) == (8, 2, 11 + 5 + 6)


def test_over_names_the_room_and_its_budget():
    one = size.Size(code=10, files=2, tokens=95)
    assert one.over("kv_hf/room", 10, 2, 9.5) is None
    assert "kv_hf/room holds 10 code lines" in one.over("kv_hf/room", 9, 2, 9.5)
    assert one.over("kv_hf/room", 10, 1, 9.5) and one.over("kv_hf/room", 10, 2, 9.4)


def test_sizes_count_a_file_in_every_room_above_it():
    found = size.sizes(["scripts/size.py", "README.md"], ["scripts", "kv_hf"])
    assert found["scripts"].files == 1 and found["scripts"].code > 50 and not found["kv_hf"].files
