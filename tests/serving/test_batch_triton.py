"""Continuous batching on the Triton kernels, in Triton's interpreter."""

from interpreter import call, needs_interpreter


def batched_answers(name, kernel):
    """Answers of a small model; runs in the interpreter's worker, where pages on the CPU are laid out as on a GPU."""
    import torch
    from tiny_models import make_model
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    import kv_hf  # noqa: F401
    from kv_hf.backends import registry
    from kv_hf.cache import layer_formats

    kept = registry.why_not, layer_formats.layout_for
    registry.why_not, layer_formats.layout_for = lambda *_: None, lambda device: "rows"
    try:
        model = make_model("llama", num_hidden_layers=1)
        generator = torch.Generator().manual_seed(3)
        prompts = [torch.randint(3, 97, (n,), generator=generator).tolist() for n in (3, 20, 40)]
        generation = GenerationConfig(
            max_new_tokens=4, do_sample=False, eos_token_id=-1, pad_token_id=0
        )
        generation.cache_implementation = name
        generation.cache_config = {"kernel": kernel, "page_size": 16}
        batching = ContinuousBatchingConfig(num_blocks=16, page_size=64, max_batch_tokens=32)
        found = model.generate_batch(prompts, generation, batching)
        return [(one.generated_tokens, one.error) for one in found.values()]
    finally:
        registry.why_not, layer_formats.layout_for = kept


@needs_interpreter
def test_batches_on_triton_answer_as_on_the_reference():
    for name in ("paged_exact", "paged_int4"):
        found = call(batched_answers, name, "triton")
        assert found == call(batched_answers, name, "reference")
        assert {error for _, error in found} == {None}
