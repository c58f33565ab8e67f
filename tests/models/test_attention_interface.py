"""`attn_implementation="tunesmith"`: models of many families give what they give with "eager"."""

from collections.abc import Iterator

import pytest
import torch
from transformers import AttentionInterface, Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration
from transformers.masking_utils import AttentionMaskInterface

from tunesmith.base.core.errors import ModelError
from tunesmith.engine.kernels.native import Kernels
from tunesmith.engine.models.attention_interface import ATTENTION_NAME, attention_forward, register_attention
from tunesmith.engine.models.tiny import FAMILIES, tiny_model

LENGTHS = (23, 7, 1)
IMAGE, VISION_START = 100, 102


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    register_attention()
    yield
    for interface in (AttentionInterface, AttentionMaskInterface):
        interface._global_mapping.pop(ATTENTION_NAME)


def both(model, work) -> list:
    """What `work` gives with "eager" and with ours."""
    found = []
    for name in ("eager", ATTENTION_NAME):
        model.set_attn_implementation(name)
        found.append(work(model))
    return found


def padded(side: str, vocabulary: int = 99) -> tuple[torch.Tensor, torch.Tensor]:
    """(ids, mask) of rows of LENGTHS."""
    ids_BT = torch.randint(3, vocabulary, (len(LENGTHS), max(LENGTHS)), generator=torch.Generator().manual_seed(0))
    place_T = torch.arange(max(LENGTHS))
    place_T = place_T.flip(0) if side == "left" else place_T
    return ids_BT, (place_T < torch.tensor(LENGTHS)[:, None]).long()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_of_padded_rows_equal_eager(family: str, side: str):
    ids_BT, mask_BT = padded(side)
    expected, found = both(
        tiny_model(family).model, lambda model: model(input_ids=ids_BT, attention_mask=mask_BT).logits
    )
    inside = mask_BT.bool()
    torch.testing.assert_close(found[inside], expected[inside], atol=2e-5, rtol=2e-5)
    assert found.isfinite().all()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_equal_eager(family: str):
    ids_BT, _ = padded("right")
    model = tiny_model(family).model

    def gradients(model) -> list[torch.Tensor]:
        loss = model(input_ids=ids_BT).logits.float().log_softmax(-1)[..., 5].mean()
        return [*torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])]

    for theirs, ours in zip(*both(model, gradients), strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen2"])
def test_bfloat16_equals_eager_within_its_precision(family: str):
    ids_BT, _ = padded("right")
    model = tiny_model(family, dtype=torch.bfloat16).model
    expected, found = both(model, lambda model: model(input_ids=ids_BT).logits.float())
    assert float((found - expected).detach().abs().mean()) < 0.02 * float(expected.detach().abs().mean())


@pytest.mark.parametrize("is_padded", [True, False])
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", ["llama", "gemma3", "mistral"])
def test_generation_from_a_cache_gives_the_tokens_of_eager(family: str, cache: str | None, is_padded: bool):
    ids_BT, mask_BT = padded("left")
    mask_BT = mask_BT if is_padded else torch.ones_like(mask_BT)
    options = {"max_new_tokens": 12, "do_sample": False, "cache_implementation": cache, "disable_compile": True}
    expected, found = both(
        tiny_model(family).model, lambda model: model.generate(ids_BT, attention_mask=mask_BT, **options)
    )
    assert torch.equal(found, expected)


def test_rows_packed_by_their_positions_do_not_see_each_other():
    ids_BT = torch.randint(3, 99, (1, 20), generator=torch.Generator().manual_seed(0))
    positions_BT = torch.cat([torch.arange(8), torch.arange(12)])[None]
    expected, found = both(
        tiny_model("llama").model, lambda model: model(input_ids=ids_BT, position_ids=positions_BT).logits
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_a_mask_of_floats_by_the_caller_is_added():
    ids_BT = torch.randint(3, 99, (1, 9), generator=torch.Generator().manual_seed(0))
    bias_BHQK = torch.randn(1, 1, 9, 9, generator=torch.Generator().manual_seed(1)).triu(1) * -1e4
    expected, found = both(
        tiny_model("llama").model, lambda model: model(input_ids=ids_BT, attention_mask=bias_BHQK).logits
    )
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)


def test_torch_compile_takes_a_whole_model():
    ids_BT, _ = padded("right")
    model = tiny_model("llama").model
    model.set_attn_implementation(ATTENTION_NAME)
    compiled = torch.compile(
        lambda ids_BT: model(input_ids=ids_BT, use_cache=False).logits, backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(ids_BT), model(input_ids=ids_BT).logits)


def vision_model() -> Qwen2_5_VLForConditionalGeneration:
    config = Qwen2_5_VLConfig(
        text_config={
            **{"vocab_size": 120, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256},
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]},
        },
        vision_config={
            **{"depth": 2, "hidden_size": 32, "intermediate_size": 64, "num_heads": 2, "out_hidden_size": 32},
            **{"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]},
        },
        image_token_id=IMAGE,
        video_token_id=101,
        vision_start_token_id=VISION_START,
        vision_end_token_id=103,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2_5_VLForConditionalGeneration(config).eval()


def test_qwen2_5_vl_with_an_image_equals_eager():
    draw = torch.Generator().manual_seed(0)
    num_patches = 6 * 8
    ids_BT = torch.randint(3, 99, (2, 30), generator=draw)
    ids_BT[:, 4] = VISION_START
    ids_BT[:, 5 : 5 + num_patches // 4] = IMAGE
    inputs = {
        "input_ids": ids_BT,
        "attention_mask": torch.ones_like(ids_BT),
        "pixel_values": torch.randn(2 * num_patches, 3 * 2 * 4 * 4, generator=draw),
        "image_grid_thw": torch.tensor([[1, 6, 8], [1, 6, 8]]),
        "mm_token_type_ids": (ids_BT == IMAGE).int(),
    }
    model = vision_model()
    expected, found = both(model, lambda model: model(**inputs).logits)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=2e-5)
    assert {layer.self_attn.config._attn_implementation for layer in model.model.language_model.layers} == {
        ATTENTION_NAME
    }
    assert model.model.visual.config._attn_implementation == ATTENTION_NAME
    blank = both(model, lambda model: model(**{**inputs, "pixel_values": 0 * inputs["pixel_values"]}).logits)[1]
    assert not torch.allclose(blank, found, atol=1e-3)


@pytest.mark.parametrize("num_heads", [1, 4])
def test_a_boolean_for_each_query_and_key_is_the_whole_truth(num_heads: int):
    draw = torch.Generator().manual_seed(0)
    query_BHQD, key_BHKD, value_BHKD = (torch.randn(2, heads, 9, 8, generator=draw) for heads in (4, 2, 2))
    allowed = torch.rand(2, num_heads, 9, 9, generator=draw) > 0.3
    allowed[:, :, :, 8] = True  # a key after most queries, as images are seen both ways
    options = {"scaling": 0.3, "kernels": Kernels("torch")}
    found, _ = attention_forward(torch.nn.Module(), query_BHQD, key_BHKD, value_BHKD, allowed, **options)
    keys, values = key_BHKD.repeat_interleave(2, 1), value_BHKD.repeat_interleave(2, 1)
    expected = torch.nn.functional.scaled_dot_product_attention(query_BHQD, keys, values, attn_mask=allowed, scale=0.3)
    torch.testing.assert_close(found, expected.transpose(1, 2))


def test_the_probabilities_are_returned_where_a_model_is_asked_for_them():
    ids_BT, mask_BT = padded("left")
    expected, found = both(
        tiny_model("llama").model,
        lambda model: model(input_ids=ids_BT, attention_mask=mask_BT, output_attentions=True).attentions,
    )
    torch.testing.assert_close(found[1][0], expected[1][0], atol=2e-6, rtol=2e-5)


def test_dropout_drops_in_training_alone():
    attention = torch.nn.Module()
    query_BHQD = torch.randn(1, 2, 50, 4, generator=torch.Generator().manual_seed(0))

    def run(p: float) -> torch.Tensor:
        options = {"dropout": p, "scaling": 0.5, "kernels": Kernels("torch")}
        return attention_forward(attention, query_BHQD, query_BHQD, query_BHQD, None, **options)[0]

    assert not torch.equal(run(0.5), run(0.0))
    attention.eval()
    assert torch.equal(run(0.5), run(0.0))


def test_what_it_does_not_know_is_refused():
    query_BHQD = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="Module gives its attention s_aux, which 'tunesmith' does not know"):
        attention_forward(
            torch.nn.Module(), *[query_BHQD] * 3, None, s_aux=torch.zeros(2), scaling=None, kernels=Kernels("torch")
        )
