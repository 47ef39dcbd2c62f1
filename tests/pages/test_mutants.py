"""Guards of kept caches, taken out one after the other: the machine of random operations, or a test, notices each."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import pytest
import test_operations
from faults import FOLDER

# what a page, or a cache, is held apart by -> (file, text, text that takes its place, who notices: a kind of World, or a test)
GUARDS: dict[str, tuple[str, str, str, Any]] = {
    "all tokens of a page": ("pages/prefix_tree.py", "tokens[start : start + size]", "tokens[start : start + 1]", "exact"),
    "tokens in front of a page": ("cache/prefix_folder.py", "accumulate(places, name_of,", "accumulate(places, lambda _, place: name_of(place),", "exact"),
    "first tokens": ("pages/prefix_tree.py", "tokens[: self.sink_tokens]).tobytes", "tokens[:0]).tobytes", "exact"),
    "model, in the folder": ("cache/prefix_store.py", "VERSION, sorted(found.items()),", "VERSION,", "exact"),
    "model, in a file": ("cache/prefix_folder.py", '"/".join(path.parts[-2:])', "path.name", ("prefix_store", "metadata_of_a_file_tells_its_state_and_sizes")),
    "sizes in a file": ("cache/prefix_folder.py", "str(a.dtype), [*a.shape], ", "", ("prefix_store", "metadata_of_a_file_tells_its_state_and_sizes")),
    "changed weights": ("cache/identity.py", "state = (*switched, described(weights_of(model), places=True))", "state = switched", ("prefix_store", "pages_of_weights_that_changed_unseen_by_torch_are_not_found", ("change", "through_data"))),
    "adapters": ("cache/identity.py", "switched = adapters_of(model),", "switched = None,", ("integrations_peft", "pages_of_another_state_are_neither_served_nor_loaded", ("change", "scale"), ("says", "differ"))),
    "hooks": ("cache/identity.py", "_hooks(model), _autocast(model), drops", "_autocast(model), drops", ("prefix_store", "a_hook_has_prefixes_of_its_own")),
    "salt": ("cache/prefix_store.py", 'return f"{space}{SALT}{salt}" if salt else space', "return space", "exact"),
    "salt, in the folder": ("cache/prefix_store.py", "return name_of(state, salt) if state and salt else state", "return state", "exact"),
    "checksum of a page": ("cache/prefix_folder.py", "if told == about(path, found):", "if told:", "int4"),
    "checksum of a saved cache": ("cache/saved.py", "if digest(tensor) != described.get(name):", "if False:", "exact"),
    "formats of a page": ("cache/prefix_folder.py", "= name_of(*", "= name_of(*() and ", ("widening", "a_folder_gives_no_pages_to_a_layer_of_other_formats")),
    "copied first tokens": ("cache/store.py", ": self.sink_tokens].clone()", ": self.sink_tokens]", ("prefix_store", "first_tokens_of_a_store_stay_where_rows_of_their_cache_move")),
    "the last token": ("cache/prefix_store.py", "max(1, recent_tokens)", "recent_tokens", "llama int4 forwards"),
    "pages of copies": ("pages/rows.py", "copied.pool.register(copied)", "pass", "exact"),
    "pages that wait for the writer": ("cache/prefix_folder.py", "with self._lock:\n            waiting = list(self._waiting)", "\n        waiting = []", ("prefix_store", "pages_that_wait_for_the_writer_are_not_given_to_others")),
    "pages in use": ("pages/prefix_tree.py", "node.page in others or", "", ("prefix_store", "tree_gives_up_ends_before_what_leads_to_them")),
    "ends before beginnings": ("pages/prefix_tree.py", "for place in reversed(places):", "for place in places:", ("prefix_store", "tree_gives_up_ends_before_what_leads_to_them")),
    "the bound": ("cache/prefix_store.py", "- self.max_bytes) > 0:", "- self.max_bytes) > 10**9:", ("prefix_store", "full_store_gives_up_the_least_recently_used")),
    "windows behind a crop": ("pages/rows.py", "int(behind[row] % size))", "0)", "int4"),
    "padding behind a crop": ("pages/rows.py", "padding, none = np.minimum(batch.padding, seen), np", "padding, none = batch.padding * 0, np", "exact"),
    "tokens that left the window": ("pages/rows.py", "if (self.batch.dropped > self.sizes.out_of_sight(seen - self.batch.padding)).any():", "if False:", "sliding"),
    "a stopped forward": ("pages/forward.py", "if self.changing or (self.members and self.joined != self.members):", "if False:", "exact, faults"),
    "pages of before a wider format": ("pages/storage.py", "if self.sealed > new else 0", "if False else 0", ("widening", "pages_that_tell_nothing_leave_it_to_the_next", ("stopped", False))),
    "an edited text": ("hf/history.py", "if not self.seen or not (self.is_whole or self.is_embedded):", "if True:", ("history", "generate_refuses_an_edited_text_and_leaves_the_cache_as_it_was")),
}  # fmt: skip


def codes(code: CodeType) -> Iterator[CodeType]:
    """Yield a code object, and all that are nested in it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, CodeType):
            yield from codes(one)


def named(code: CodeType) -> Any:
    """Return by what a function is found in a changed file: a lambda by its line and arguments too."""
    return code.co_qualname, code.co_firstlineno, code.co_varnames[: code.co_argcount]


def functions(space: Any) -> Iterator[FunctionType]:
    """Yield the functions of a module or a class, whatever they are wrapped in."""
    for value in list(vars(space).values()):
        if isinstance(value, type) and value.__module__ == getattr(
            space, "__module__", space.__name__
        ):
            yield from functions(value)
        for name in ("fget", "func", "__func__", "__wrapped__"):
            value = getattr(value, name, None) or value
        if isinstance(value, FunctionType):
            yield value


@contextlib.contextmanager
def without(path: str, text: str, other: str) -> Iterator[None]:
    """Let the functions of a file of kv_hf run with another text in it."""
    file = Path(FOLDER, path)
    source, module = file.read_text("utf-8"), sys.modules[f"kv_hf.{path[:-3].replace('/', '.')}"]
    assert text in source
    changed = compile(source.replace(text, other), str(file), "exec", dont_inherit=True)
    new = {named(code): code for code in codes(changed)}
    before = {
        one: one.__code__ for one in functions(module) if one.__code__.co_filename == str(file)
    }
    for one, code in before.items():
        one.__code__ = new[named(code)]
    try:
        yield
    finally:
        for one, code in before.items():
            one.__code__ = code


def look(who: Any, folder: Path) -> None:
    """Run a test, with a case of its parameters, or the machine in some worlds of a kind."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        if isinstance(who, str):
            for seed in range(6):
                (folder / str(seed)).mkdir()
                test_operations.walk(who, seed, 200, "disk", folder / str(seed), patch)
            return
        name, test, *case = who
        module = importlib.import_module(f"test_{name}")
        call = getattr(module, f"test_{test}")
        names = call.__code__.co_varnames[: call.__code__.co_argcount]
        given = {name: getattr(module, str(value), value) for name, value in case}
        given |= {"tmp_path": folder, "monkeypatch": patch}
        call(**{one: given[one] for one in names})


@pytest.mark.slow
@pytest.mark.parametrize("guard", GUARDS)
def test_a_guard_that_is_missing_is_noticed(guard, tmp_path):
    *change, who = GUARDS[guard]
    look(who, tmp_path / "with")
    with without(*change), pytest.raises(BaseException) as noticed:
        look(who, tmp_path / "without")
    print(f"\n{guard}: {noticed.typename}")
