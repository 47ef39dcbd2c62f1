"""The eager attention functions that "kv_hf" can replace: those of transformers' models, and copies of their common forms."""

import ast
import functools
import hashlib
import inspect
import textwrap
from types import FunctionType
from typing import Any

# Forms of `eager_attention_forward` in the models of transformers 5.17 to 5.23 that were read and compute
# softmax(scaling * query @ keys + mask) @ values, by digest of the syntax tree without annotations; with the arguments
# that bend the scores where they are given.
_NONE: frozenset[str] = frozenset()
_FORMS = {
    "a0a9be62b4bcf53a": _NONE,  # llama and 150 others: keys and values repeated, softmax in fp32
    "9e835ca230ffc68a": _NONE,  # bart, whisper: one key head per query head, softmax in the model's dtype
    "9c03d4e00c940d69": _NONE,  # gpt_neox, clap
    "07fcf700ebeb6050": _NONE,  # opt, clip
    "b361fc842b5cf64f": _NONE,  # vit, beit
    "a91907e04598671c": _NONE,  # blip_2, kosmos2
    "d0cc5c1229cace3d": frozenset({"position_bias"}),  # t5
    "7bd896dae528f884": frozenset({"softcap"}),  # gemma2
}
_REPEAT_KV = "7ead3e283261e7b1"


@functools.cache
def what_it_reads(function: Any) -> frozenset[str] | None:
    """Return the arguments beside scaling and dropout that an eager function of a known form reads.

    None where its form is not known: it may cap the scores, or add what only its module knows.
    """
    if not isinstance(function, FunctionType):
        return None
    reads = _FORMS.get(form(function) or "")
    if "repeat_kv" not in function.__code__.co_names or reads is None:
        return reads
    repeat = function.__globals__.get("repeat_kv")
    known = isinstance(repeat, FunctionType) and form(repeat) == _REPEAT_KV
    return reads if known else None


def form(function: FunctionType) -> str | None:
    """Return a digest of a function without its name, docstring, comments and annotations; None without a source."""
    if hasattr(function, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return None
    return form_of(tree) if isinstance(tree, ast.FunctionDef) and not tree.decorator_list else None


def form_of(tree: ast.FunctionDef) -> str:
    """Return the digest of a function's syntax tree."""
    body = tree.body[1:] if ast.get_docstring(tree) is not None else tree.body
    bare = ast.parse(ast.unparse(tree.args).join(("def form(", "): pass"))).body[0]
    assert isinstance(bare, ast.FunctionDef)
    for argument in ast.walk(bare.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    text = "\n".join([ast.unparse(bare.args), *(ast.unparse(statement) for statement in body)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]
