"""`accelerate(model, pack=True)`: no operation on padding, no mask of all pairs, and the library's numbers."""

import copy
from functools import cache

import pytest
import torch
from adapter_models import NAFLEX, PIXTRAL, SIGLIP, TEXT, assert_same, family
from checks import assert_close, outputs, randomize, slow_but
from torch import Tensor, nn
from vision_families import naflexvit

import vitfast
from vitfast import ops
from vitfast.backend import eager, padding

TOWERS = (NAFLEX, SIGLIP, PIXTRAL)


@cache
def state(name: str) -> nn.Module:
    torch.manual_seed(3)
    return randomize(family(name).make()).eval()


def pair(original: nn.Module) -> tuple[nn.Module, nn.Module]:
    """(accelerated with pack=True, the original)."""
    return vitfast.accelerate(copy.deepcopy(original), pack=True), copy.deepcopy(original)


def naflex(**options) -> nn.Module:
    pytest.importorskip("timm")
    return randomize(naflexvit(pos_embed_grid_size=(4, 4), **options)()).eval()


def padded(*grids: tuple[int, int]) -> dict:
    """Patches of images of these grids as NaFlexVit takes them."""
    longest = max(h * w for h, w in grids)
    places, valid = torch.zeros(len(grids), longest, 2, dtype=torch.long), torch.zeros(len(grids), longest, dtype=bool)
    for i, (h, w) in enumerate(grids):
        places[i, : h * w] = torch.cartesian_prod(torch.arange(h), torch.arange(w))
        valid[i, : h * w] = True
    x = torch.randn(len(grids), longest, 192, generator=torch.manual_seed(0))
    return dict(x=x, patch_coord=places, patch_valid=valid)


def batch_of(name: str, *grids: tuple[int, int]) -> dict:
    """A batch of images of these grids of patches."""
    torch.manual_seed(len(grids))
    if name == NAFLEX:
        return padded(*grids)
    if name == PIXTRAL:
        sizes = torch.tensor(grids) * 8
        return dict(pixel_values=torch.randn(len(grids), 3, 32, 32), image_sizes=sizes)
    longest = max(h * w for h, w in grids)
    mask = torch.arange(longest) < torch.tensor([[h * w] for h, w in grids])
    return dict(
        pixel_values=torch.randn(len(grids), longest, 192),
        pixel_attention_mask=mask.long(),
        spatial_shapes=torch.tensor(grids),
    )


BATCHES = [((2, 2), (1, 3), (1, 1)), ((1, 2), (3, 1), (2, 1), (1, 4))]


def same(models: tuple, batch: dict) -> None:
    """Outputs of valid tokens and all gradients are equal."""
    assert_same(*models, batch, "pixel_attention_mask" if "pixel_attention_mask" in batch else "")


def attention_in(model: nn.Module, batch: dict) -> list[tuple[tuple, list | None]]:
    """(shape of the input, offsets) of each attention block and each attention in a forward."""
    seen = []

    def watched(function):
        def call(x, *a, offsets=None, **k):
            seen.append((tuple(x.shape), None if offsets is None else offsets.tolist()))
            return function(x, *a, offsets=offsets, **k)

        return call

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        outputs(model, batch)  # compiled before
        del seen[:]
        for name in ("attention_block", "attention"):
            patch.setattr(ops, name, watched(getattr(ops, name)))
        outputs(model, batch)
    return seen


def packed(model: nn.Module) -> list[str | None]:
    """Of each tower, why its last call was not packed."""
    return [entry.why for entry in vitfast.acceleration_report(model) if entry.part == "packing"]


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_valid_tokens_and_gradients_are_the_padded_runs(name):
    models = pair(state(name))
    for grids in BATCHES:
        same(models, batch_of(name, *grids))
        assert packed(models[0]) == [None]
    prefix = getattr(models[0], "num_prefix_tokens", 0)
    lengths = torch.tensor([0, 4 + prefix, 3 + prefix, 1 + prefix]).cumsum(0).tolist()
    found = attention_in(models[0], batch_of(name, *BATCHES[0]))
    assert [given for given in found if given[1] is not None] == [((lengths[-1], 32), lengths)] * 2


@pytest.mark.parametrize("name", slow_but([], TOWERS))
def test_without_pack_padding_has_the_librarys_numbers(name):
    """And of several calls, the last one decides."""
    original = state(name)
    ours, batch = vitfast.accelerate(copy.deepcopy(original)), batch_of(name, *BATCHES[0])
    for a, b in zip(outputs(ours, batch), outputs(original, batch), strict=True):
        assert_close(a, b, atol=2e-5)
    assert not packed(ours)
    outputs(vitfast.accelerate(ours, pack=True), batch)
    assert packed(ours) == [None]
    assert not packed(vitfast.accelerate(ours))


OPTIONS = [
    dict(class_token=True, reg_tokens=2, rope_type="mixed"),
    dict(class_token=True, rope_type="axial"),
    dict(qkv_bias=False, qk_norm=True, class_token=True),
    dict(global_pool="map"),
    dict(fc_norm=False, use_key_only_attn_mask=True),
]


@pytest.mark.parametrize("options", slow_but([], OPTIONS), ids=lambda options: " ".join(options))
def test_naflexvits(options):
    """Images of padding alone, and padding in the middle, too."""
    try:
        models = pair(naflex(**options))
    except TypeError as error:
        pytest.skip(str(error))
    one, other = padded((2, 3), (4, 4), (1, 5)), padded((1, 2), (3, 1))
    one["patch_valid"][0, 1], other["patch_valid"][1] = False, "map" in options.values()
    for batch in (one, other):
        same(models, batch)
        assert packed(models[0]) == [None]


@pytest.mark.slow
def test_batches_without_padding_stay_batches():
    models, batch = pair(state(SIGLIP)), batch_of(SIGLIP, (1, 3), (3, 1))
    same(models, batch)
    assert packed(models[0]) == [None] and not attention_in(models[0], batch), "no function of ours in the graph"
    same(pair(naflex()), dict(x=torch.randn(2, 3, 32, 32)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*checkpointing:FutureWarning")
@pytest.mark.parametrize("name", TOWERS)
def test_activation_checkpointing(name):
    """timm's is around a layer, and runs it again with the same packed tokens; transformers' keeps the padding."""
    models = pair(state(name))
    for model in models:
        if name == NAFLEX:
            model.train().set_grad_checkpointing()
        else:
            model.train().gradient_checkpointing_enable(dict(use_reentrant=False))
    for grids in BATCHES[:2]:
        same(models, batch_of(name, *grids))
        assert name != NAFLEX or packed(models[0]) == [None]


def dropout(model: nn.Module) -> None:
    """Active, and without effect."""
    for module in model.train().modules():
        if type(getattr(module, "dropout", None)) is float:
            module.dropout = 1e-9
        if isinstance(module, nn.Dropout):
            module.p = 1e-9


@pytest.mark.parametrize("name", slow_but([], [*TOWERS, "drop path"]))
def test_draws_in_training_keep_the_padding_and_are_the_librarys(name):
    if name == "drop path":
        models, batch = pair(naflex(drop_path_rate=0.4)), padded((2, 3), (4, 4), (1, 5), (2, 2))
    else:
        models, batch = pair(state(name)), batch_of(name, *BATCHES[0])
        for model in models:
            dropout(model)
    for _ in range(2):
        same([model.train() for model in models], batch)
        assert "drop path" in packed(models[0])[0] if name == "drop path" else packed(models[0])[0] is not None
    outputs(models[0].eval(), batch)
    assert packed(models[0]) == [None]


HOOKS = {
    "a block": lambda model, hook: model.blocks[0].register_forward_hook(hook),
    "in a block": lambda model, hook: model.blocks[1].mlp.fc1.register_forward_hook(hook),
    "the model": lambda model, hook: model.register_forward_hook(hook),
    "all modules": lambda model, hook: torch.nn.modules.module.register_module_forward_hook(hook),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", HOOKS)
def test_hooks_see_the_librarys_tokens(kind):
    ours, theirs = pair(naflex(fc_norm=False))
    batch, shapes = padded((2, 3), (4, 4)), []
    for each in (ours, theirs):
        seen = []
        handle = HOOKS[kind](each, lambda _, __, out, seen=seen: seen.append(out))
        outputs(each, batch)
        shapes.append([out.shape for out in seen if isinstance(out, Tensor)])
        assert each is theirs or "hooks" in packed(ours)[0]
        handle.remove()
    assert shapes[0] and set(shapes[0]) <= set(shapes[1])
    outputs(ours, batch)
    assert packed(ours) == [None], "gone with the hook"


class Mixes(nn.Module):
    """An MLP whose output depends on the other tokens."""

    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.mlp = mlp

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) + x.roll(1, 1)


def mixing(model: nn.Module) -> None:
    for block in model.blocks:
        block.mlp = Mixes(block.mlp)


def own_forward(model: nn.Module) -> None:
    block = model.blocks[1]
    block.forward = lambda x, **masks: 2 * type(block).forward(block, x, **masks)


CHANGES = {mixing: "its numbers differ", own_forward: "some of its layers are the library's"}


@pytest.mark.parametrize("change", slow_but([mixing], CHANGES))
def test_changed_layers_keep_the_padding(change):
    models = pair(naflex())
    for model in models:
        change(model)
    for _ in range(2):
        same(models, padded((2, 3), (4, 4)))
        assert packed(models[0])[0].startswith(CHANGES[change])


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["hidden_states", "attentions"])
@pytest.mark.parametrize("name", [PIXTRAL, SIGLIP])
def test_outputs_of_layers_are_the_librarys(name, asked):
    models, batch = pair(state(name)), batch_of(name, *BATCHES[0])
    for implementation in ("sdpa", "eager"):
        found = []
        for each in models:
            each.set_attn_implementation(implementation)
            found.append(each(**batch, **{f"output_{asked}": True})[asked])
        assert len(found[0]) == len(found[1]) and (implementation == "sdpa" or len(found[0]) >= 2)
        for a, b in zip(*found):
            assert a is None or (a.shape == b.shape and torch.allclose(a, b, atol=1e-4))
        same(models, batch)
        assert packed(models[0]) == [None] or not eager._HAS_LIMIT, "without, it is packed again"


@pytest.mark.slow
def test_a_mask_of_the_callers_own_is_taken_as_it_is():
    same(pair(naflex()), padded((2, 3), (4, 4)) | dict(attn_mask=torch.randn(2, 1, 16, 16)))
    models, x, mask = pair(state(SIGLIP)), torch.randn(2, 4, 32), torch.rand(2, 1, 4, 4) > 0.4
    mask[..., 0] = True
    additive = torch.zeros(2, 1, 1, 4).index_fill(3, torch.tensor([3]), torch.finfo(torch.float32).min)
    additive[..., 1] = 0.5
    for given in (mask, additive):
        found = [each.encoder(inputs_embeds=x, attention_mask=given).last_hidden_state for each in models]
        assert_close(*found, atol=2e-5)
        assert packed(models[0]) == ["the mask is not one of padding"]


@pytest.mark.slow
def test_texts_keep_their_padding():
    """SigLIP 2's tower of texts pools its last token, padding or not."""
    transformers = pytest.importorskip("transformers")
    models = pair(randomize(transformers.Siglip2TextModel(transformers.Siglip2TextConfig(**TEXT)).eval()))
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    assert_close(*(each(torch.arange(8).view(2, 4), mask).pooler_output for each in models), atol=2e-5)
    assert not packed(models[0])


@pytest.mark.slow
@pytest.mark.parametrize("name", TOWERS)
def test_copies_and_restored_models_run_the_librarys_code(name, monkeypatch):
    library = pytest.importorskip("transformers.models.pixtral.modeling_pixtral")
    function = library.generate_block_attention_mask
    if isinstance(function, padding._Masks):  # accelerated models of other tests have left it there
        function = function.write
    monkeypatch.setattr(library, "generate_block_attention_mask", function)
    ours, batch = pair(state(name))[0], batch_of(name, *BATCHES[0])
    outputs(ours, batch)
    for model in (copy.deepcopy(ours), vitfast.restore(ours)):
        assert all(module._compiled_call_impl is None for module in model.modules())
        assert all(map(torch.equal, outputs(model, batch), outputs(state(name), batch)))
    assert library.generate_block_attention_mask is function


@pytest.mark.slow
@pytest.mark.parametrize("name", [NAFLEX, PIXTRAL])
def test_compiled_code_keeps_the_padding(name):
    ours, theirs = pair(state(name))
    batch = batch_of(name, *BATCHES[0])
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="eager")
    with torch.no_grad():
        assert_close(*(outputs(each, batch)[0] for each in (compiled, theirs)), atol=2e-5)
    assert packed(ours) == [padding.AT_THE_FIRST_CALL]


@pytest.mark.slow
def test_lora():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    torch.manual_seed(5)
    models = pair(peft.get_peft_model(copy.deepcopy(state(SIGLIP)), config).eval())
    batch = batch_of(SIGLIP, *BATCHES[0])
    same(models, batch)
    found = [offsets for _, offsets in attention_in(models[0], batch)]
    assert packed(models[0]) == [None] and [0, 4, 7, 8] in found
