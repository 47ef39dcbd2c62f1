import pytest
import quanto_in_python  # noqa: F401
from tiny_models import make_model
from tiny_tokenizer import sentence, tiny_tokenizer


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A saved tiny Llama with a tokenizer that has a chat template, and a text of its words."""
    found = tmp_path_factory.mktemp("model")
    make_model("llama").save_pretrained(found)
    tiny_tokenizer().save_pretrained(found)
    (found / "text.txt").write_text(sentence(900, seed=3))
    return found
