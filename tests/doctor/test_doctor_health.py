"""kv-hf doctor: what it calls broken, changed or merely absent, and its exit codes."""

import json
import sys
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import transformers
from packaging.version import Version
from transformers import masking_utils
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin

import kv_hf
import kv_hf_cli
from kv_hf.backends.cpu import library
from kv_hf.backends.triton import support
from kv_hf.doctor import environment, health, seams
from kv_hf.doctor.environment import installed
from kv_hf.doctor.fingerprints import KNOWN
from kv_hf.doctor.seam_list import SEAMS, TESTED, Seam
from kv_hf.doctor.source import fingerprint_of_source, methods_called, normal_form
from kv_hf.hf import install

IS_TESTED = transformers.__version__ in TESTED
needs_tested = pytest.mark.skipif(not IS_TESTED, reason="another version of transformers")


def quick(capsys, *more):
    """Return (exit code, what is printed) without the self-test."""
    code = kv_hf_cli.main(["doctor", "--device", "cpu", "--quick", *more])
    return code, capsys.readouterr().out


def finding(name):
    return next(one for one in [seams.check_version(), *seams.check_seams()] if one.name == name)


# -- seams ---------------------------------------------------------------------------------------------------


@needs_tested
def test_all_seams_of_a_tested_version_are_as_tested():
    for one in [seams.check_version(), *seams.check_seams()]:
        came_later = one.status == "note" and "came with" in one.detail
        assert one.status == "ok" or came_later, one


def test_every_seam_whose_change_is_told_has_a_fingerprint_of_every_tested_version():
    told = {seam.place for seam in SEAMS if seam.told}
    assert set(KNOWN) == {*told, seams.EXPAND}
    assert all(set(known) == set(TESTED) for known in KNOWN.values())
    assert len({seam.place for seam in SEAMS}) == len(SEAMS)


@needs_tested
def test_fingerprints_are_those_of_the_installed_version():
    for place, own in seams.known_of_installed().items():
        assert KNOWN[place][transformers.__version__] == own, place


@pytest.mark.parametrize("name", ["_prepare_cache_for_generation", "_prefill"])
def test_patched_methods_are_compared_below_the_patch(name):
    assert install.original(name) is not getattr(GenerationMixin, name)
    assert install.original(name).__module__ == "transformers.generation.utils"


@pytest.mark.parametrize(
    ("owner", "attribute", "seam"),
    [
        (masking_utils, "create_sliding_window_causal_mask", "create_sliding_window_causal_mask"),
        (Cache, "get_query_offset", "Cache.get_query_offset"),
        (GenerationMixin, "_supports_logits_to_keep", None),
    ],
    ids=str,
)
def test_a_missing_seam_is_broken(monkeypatch, capsys, owner, attribute, seam):
    monkeypatch.delattr(owner, attribute)
    found = finding(seam or f"GenerationMixin.{attribute}")
    assert found.status == "broken"
    assert found.detail.startswith("missing (")
    code, printed = quick(capsys)
    assert code == 1
    assert f"[XX] {found.name}" in printed and f"  {found.name}: missing" in printed


def test_a_function_without_a_parameter_that_is_passed_is_broken(monkeypatch):
    def crop(self, count):
        """Another signature."""

    monkeypatch.setattr(Cache, "crop", crop)
    found = finding("Cache.crop")
    assert found.status == "broken"
    assert "it does not take tokens_to_remove (but self, count)" in found.detail


def test_a_changed_function_is_a_warning(monkeypatch, capsys):
    def crop(self, tokens_to_remove):
        return None

    crop.__module__ = "transformers.cache_utils"
    monkeypatch.setattr(Cache, "crop", crop)
    found = finding("Cache.crop")
    assert (found.status, found.detail.partition(";")[0]) == (
        "warning",
        "changed since the versions that were tested",
    )
    code, printed = quick(capsys)
    assert code == 0
    assert "[!!] Cache.crop" in printed and "Nothing is broken, 1 warnings above" in printed


def test_a_function_of_somebody_else_is_a_warning(monkeypatch):
    monkeypatch.setattr(Cache, "crop", lambda self, tokens_to_remove: None)
    found = finding("Cache.crop")
    assert found.status == "warning"
    assert f"replaced by {__name__}" in found.detail


def test_a_list_of_names_without_ours_is_broken(monkeypatch):
    names = ("static", "paged_exact")
    monkeypatch.setattr(configuration_utils, "ALL_CACHE_IMPLEMENTATIONS", names)
    found = finding("registration")
    assert found.status == "broken" and "paged_int4" in found.detail
    assert "paged_exact" not in found.detail


def test_other_layers_of_a_dynamic_cache_are_broken(monkeypatch):
    class OtherLayer:
        is_sliding = False

    made = DynamicCache.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        self.layers[0] = OtherLayer()

    monkeypatch.setattr(DynamicCache, "__init__", init)
    found = finding("layers of DynamicCache")
    assert found.status == "broken"
    assert "OtherLayer has no keys" in found.detail and "not DynamicLayer" in found.detail


@pytest.mark.parametrize("body", ["return kv_nope, k_rot", None], ids=["changed", "missing"])
def test_expansion_of_latents_is_compared_in_all_models(monkeypatch, tmp_path, body):
    folder = tmp_path / "models" / "deepseek_v9"
    folder.mkdir(parents=True)
    text = "class Attention:\n    pass\n"
    if body:
        text += f"    def expand_kv(self, kv_nope, k_rot):\n        {body}\n"
    (folder / "modeling_deepseek_v9.py").write_text(text)
    monkeypatch.setattr(seams.transformers, "__file__", str(tmp_path / "__init__.py"))
    found = seams.check_expansion()
    if body:
        assert found.status == "warning" and "deepseek_v9" in found.detail
    else:
        assert found.status == "broken" and "missing in all models" in found.detail


@pytest.mark.parametrize(
    ("version", "status", "says"),
    [
        ("5.17.0", "ok", "tested with 5.17.0 and 5.23.0"),
        ("5.20.1", "ok", "lies within"),
        ("5.23.1", "warning", "newer than"),
        ("6.0.0.dev0", "warning", "newer than"),
        ("5.16.2", "broken", "needs 5.17.0 or newer"),
    ],
)
def test_version_of_transformers_is_compared_with_the_tested_ones(version, status, says):
    found = seams.check_version(version)
    assert found.status == status and says in found.detail


def test_a_seam_of_a_later_version_is_no_fault():
    later = f"{Version(transformers.__version__).major + 1}.0.0"
    seam = Seam("cache_utils:LayerOfTomorrow", "is something new", since=later)
    assert seams.check_seam(seam).status == "note"
    assert seams.check_seam(Seam("cache_utils:Gone", "was there")).status == "broken"
    assert seams.check_seam(Seam("no_such_module:x", "was there")).status == "broken"


def test_comments_docstrings_and_layout_do_not_change_a_fingerprint():
    one = "def f(x):\n    return x + 1\n"
    same = '    def f(x):\n        """Say.\n\n        More."""\n        # why\n\n        return x + 1  \n'
    other = "def f(x):\n    return x + 2\n"
    assert fingerprint_of_source(one) == fingerprint_of_source(same)
    assert fingerprint_of_source(one) != fingerprint_of_source(other)
    assert normal_form(same) == "def f(x):\n    return x + 1"


def test_methods_are_found_in_source_with_signatures_of_any_length():
    text = (
        "class A:\n    def expand_kv(self, a):\n        return a\n\n    def other(self):\n        pass\n"
        "class B:\n    def expand_kv(\n        self, a: int,\n    ) -> int:\n\n        return a\nx = 1\n"
    )
    first, second = methods_called("expand_kv", text)
    assert first.strip() == "def expand_kv(self, a):\n        return a"
    assert second.rstrip().endswith(") -> int:\n\n        return a")


# -- the installation ----------------------------------------------------------------------------------------


def test_a_library_that_cannot_be_loaded_is_broken(monkeypatch, capsys, tmp_path):
    (tmp_path / "_native.abi3.so").write_bytes(b"no library at all")
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "_is_checkout", lambda: False)
    monkeypatch.setattr(library, "_loaded", library._loaded.__wrapped__)
    monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
    assert "cannot be loaded" in library.missing()
    code, printed = quick(capsys)
    assert code == 1
    assert "[XX] C kernel" in printed


@pytest.mark.parametrize("turned_off", [False, True])
def test_no_compiler_and_no_gpu_are_no_fault(monkeypatch, capsys, tmp_path, turned_off):
    if turned_off:
        monkeypatch.setenv(library.ISA_VARIABLE, "none")
    else:
        monkeypatch.delenv(library.ISA_VARIABLE, raising=False)
        monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setattr(library, "_loaded", library._loaded.__wrapped__)
    code, printed = quick(capsys)
    assert ("[--] C kernel" if turned_off else "[!!] C kernel") in printed
    assert ("KV_HF_ISA=none" if turned_off else "was not compiled") in printed
    assert "[XX]" not in printed
    assert code == 0


@pytest.mark.parametrize("tag", ["py3-none-any", "cp311-abi3-linux_x86_64"])
def test_doctor_tells_which_wheel_was_installed(monkeypatch, tmp_path, tag):
    """The wheel without the C kernel was called as the fast one is, and nothing told them apart."""
    info = tmp_path / "some_package-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: some_package\nVersion: 1.0\n")
    (info / "WHEEL").write_text(f"Wheel-Version: 1.0\nTag: {tag}\n")
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path / "some_package"
    assert installed("some_package", folder) == f"wheel {tag}, in {folder}"
    elsewhere = tmp_path / "clone" / "some_package"
    assert installed("some_package", elsewhere) == f"elsewhere, as 1.0; runs from {elsewhere}"
    (info / "direct_url.json").write_text('{"url": "file:///x", "dir_info": {"editable": true}}')
    assert installed("some_package", elsewhere) == f"editable, runs from {elsewhere}"
    assert installed("no_such_package", elsewhere) == f"not as a package; runs from {elsewhere}"


def test_a_bad_isa_variable_is_broken(monkeypatch):
    if library.missing():
        pytest.skip("no C kernel here")
    monkeypatch.setenv(library.ISA_VARIABLE, "9")
    monkeypatch.setattr(library, "_loaded", library._loaded.__wrapped__)
    found = health.check_c_kernel()
    assert found.status == "broken" and "KV_HF_ISA must be between" in found.detail
    assert "(0 portable C" in found.detail


def test_a_gpu_without_triton_is_broken(monkeypatch):
    monkeypatch.setattr(support, "installed_version", lambda: None)
    found = health.check_device(torch.device("cuda"))
    assert found.status == "broken" and "triton is not installed" in found.detail
    assert health.check_device(torch.device("cpu")).status == "ok"
    assert health.check_device(torch.device("mps")).status == "note"


def _none_installed(package):
    raise PackageNotFoundError(package)


def test_requirements_are_compared_with_what_is_installed(monkeypatch):
    lines = ["torch>=2.11", "transformers>=99", "no-such-thing>=1", "triton>=99; extra == 'gpu'"]
    lines += ["accelerate>=0.1; extra == 'train'", "pytest>=99; extra == 'test'"]
    monkeypatch.setattr(health, "requires", lambda package: lines)
    installed = {"torch": "2.11.0", "transformers": "5.23.0", "accelerate": "1.0"}

    def version(package):
        return installed[package] if package in installed else _none_installed(package)

    monkeypatch.setattr(health, "version", version)
    found = {one.name: one.status for one in health.check_requirements()}
    assert found == {
        "torch": "ok",
        "transformers": "broken",
        "no-such-thing": "broken",
        "triton": "note",
        "accelerate": "ok",
    }
    monkeypatch.setattr(health, "requires", _none_installed)
    assert [one.status for one in health.check_requirements()] == ["note"]


def test_environment_holds_what_a_bug_report_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("KV_HF_SOMETHING", "7")
    found = dict(environment())
    names = ("kv_hf", "python", "system", "torch", "transformers", "accelerate", "safetensors")
    assert all(found[name] for name in (*names, "triton", "cpu", "C kernel"))
    assert found["KV_HF_HOME"] == f"{tmp_path / 'home'}, not made yet"
    assert found["KV_HF_SOMETHING"] == "7"
    (tmp_path / "file").touch()
    for value, reason in (
        ("file", "which is no folder"),
        ("file/sub", f"which cannot be made: {tmp_path / 'file'} is no folder"),
    ):
        monkeypatch.setenv("KV_HF_HOME", str(tmp_path / value))
        assert dict(environment())["KV_HF_HOME"] == f"{tmp_path / value}, {reason}"
        assert health.check_home().status == "warning" and reason in health.check_home().detail
    monkeypatch.setenv("KV_HF_HOME", "/proc/nope")
    assert health.check_home().status == "warning"
    monkeypatch.setenv("KV_HF_HOME", str(tmp_path / "home"))
    assert health.check_home().status == "ok" and not (tmp_path / "home").exists()
    assert found["python"].startswith(".".join(map(str, sys.version_info[:3])))


# -- JSON ----------------------------------------------------------------------------------------------------


def test_json_holds_everything(capsys):
    code, printed = quick(capsys, "--json", "--page-size", "32")
    told = json.loads(printed)
    assert (code == 0) is told["healthy"] is (told["broken"] == [])
    assert told["environment"]["torch"] == torch.__version__
    assert told["environment"]["kv_hf"] == kv_hf.__version__
    assert told["subject"]["page_size"] == 32 and told["subject"]["dtype"] == "bfloat16"
    assert [f"paged_{one['format']}" for one in told["formats"]] == list(kv_hf.cache_names())
    assert len(told["seams"]) >= len(SEAMS)
    assert all({"name", "status", "detail"} == set(one) for one in told["seams"] + told["health"])
    assert told["self_test"] is None


def test_verbose_lists_all_seams(capsys):
    _, short = quick(capsys)
    _, long = quick(capsys, "--verbose")
    assert "Cache.get_query_offset" in long and "seams found" not in long
    if IS_TESTED:
        assert "Cache.get_query_offset" not in short and "seams found" in short
