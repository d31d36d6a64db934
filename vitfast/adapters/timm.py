"""timm's VisionTransformer and its relatives of the same Block (DeiT, DINOv2, CLIP, hybrids)."""

import torch
from timm.layers import DropPath, Mlp
from timm.layers import LayerNorm as TimmLayerNorm
from timm.layers.activations import GELU, GELUTanh
from timm.models import vision_transformer as vit
from timm.models.vision_transformer import Attention, LayerScale
from torch import Tensor, nn

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from ..submodules import Modules, layout
from . import leaves
from .fallbacks import library_runs
from .fused_blocks import ABSENT, FusedBlock, asked, run, weights_and_biases

_NORMS = (TimmLayerNorm, nn.LayerNorm)
_UNUSED = (nn.Identity, ABSENT)  # places of what some versions have and some models fill
_SCALES, _DROP_PATHS = (nn.Identity, LayerScale), (nn.Identity, DropPath)
_APPROXIMATE = {nn.GELU: None, GELU: "none", GELUTanh: "tanh"}  # None: the module says


def _fast_norm(norm: nn.Module) -> str | None:
    return "timm's fast norm is on" if getattr(norm, "_fast_norm", False) else None


def _attention_unsupported(modules: Modules) -> str | None:
    attn = modules["attn"]
    if attn.num_heads * attn.head_dim * 3 != modules["attn.qkv"].out_features:
        return "attn.qkv does not give num_heads heads"
    if attn.scale != attn.head_dim**-0.5:
        return "attn.scale is not 1 / sqrt(head size)"
    return head_unsupported(attn.head_dim, attn.scale) or _fast_norm(modules["norm1"])


def _drop_path(module: nn.Module, batch: int, device: torch.device) -> Tensor | None:
    """timm's draws: one Bernoulli number a sample."""
    if type(module) is nn.Identity or module.drop_prob == 0 or not module.training:
        return None
    keep = 1 - module.drop_prob
    factors = torch.empty(batch, device=device).bernoulli_(keep)
    return factors.div_(keep) if keep > 0 and module.scale_by_keep else factors


ATTENTION = FusedBlock(
    "attention block",
    ops.attention_block,
    layout(
        {"norm1": _NORMS, "attn": Attention, "attn.qkv": nn.Linear, "attn.q_norm": _UNUSED, "attn.k_norm": _UNUSED}
        | {"attn.attn_drop": nn.Dropout, "attn.norm": _UNUSED, "attn.gate": ABSENT, "attn.proj": nn.Linear}
        | {"attn.proj_drop": nn.Dropout, "ls1": _SCALES, "drop_path1": _DROP_PATHS}
    ),
    weights_and_biases("norm1", "attn.qkv", "attn.proj"),
    options=lambda modules: dict(num_heads=modules["attn"].num_heads, eps=modules["norm1"].eps),
    layer_scale=("ls1", "gamma"),
    drop_path=lambda modules, batch, device, _: _drop_path(modules["drop_path1"], batch, device),
    unsupported_reason=_attention_unsupported,
)

MLP = FusedBlock(
    "MLP block",
    ops.mlp_block,
    layout(
        {"norm2": _NORMS, "mlp": Mlp, "mlp.fc1": nn.Linear, "mlp.act": tuple(_APPROXIMATE), "mlp.drop1": nn.Dropout}
        | {"mlp.norm": _UNUSED, "mlp.fc2": nn.Linear, "mlp.drop2": nn.Dropout}
        | {"ls2": _SCALES, "drop_path2": _DROP_PATHS}
    ),
    weights_and_biases("norm2", "mlp.fc1", "mlp.fc2"),
    options=lambda modules: dict(
        eps=modules["norm2"].eps, approximate=_APPROXIMATE[type(modules["mlp.act"])] or modules["mlp.act"].approximate
    ),
    layer_scale=("ls2", "gamma"),
    drop_path=lambda modules, batch, device, _: _drop_path(modules["drop_path2"], batch, device),
    unsupported_reason=lambda modules: _fast_norm(modules["norm2"]),
)


class Block(vit.Block):
    """timm's pre-norm block; what a fused block cannot take, masks too, runs on timm's modules."""

    fused_blocks = (ATTENTION, MLP)
    residual_in_fp32 = None

    def forward(self, x: Tensor, *args, **kwargs) -> Tensor:
        reason = asked(dict(zip(("attn_mask", "is_causal"), args), **kwargs))
        if reason is not None:
            for block in self.fused_blocks:
                library_runs(self, block.name, reason, of_this_call=True)
            return super().forward(x, *args, **kwargs)
        y = run(ATTENTION, self, x)
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x)))) if y is None else y
        y = run(MLP, self, x)
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x)))) if y is None else y


class LayerNorm(TimmLayerNorm):
    """timm's LayerNorm on `ops.layer_norm`."""

    def forward(self, x: Tensor) -> Tensor:
        y = leaves.normalize(self, x)
        return super().forward(x) if y is None else y


def _eva_unsupported(block: nn.Module, above: tuple[nn.Module, ...]) -> str:
    """Why a layer of EVA is left. above: the modules that it is in, which hold the rotary positions."""
    attention, mlp = block._modules.get("attn"), block._modules.get("mlp")
    found = {
        "normalises after each branch": type(block).__name__ == "EvaBlockPostNorm",
        "rotary positions": any(getattr(module, "rope", None) is not None for module in above),
        "biases of q and v, none of k": getattr(attention, "q_bias", None) is not None,
        "SwiGLU": type(mlp).__name__ in ("SwiGLU", "GluMlp"),
    }
    return ", ".join(reason for reason, so in found.items() if so) or "a layer that vitfast does not know"


BLOCKS = {Block: lambda: vit.Block(16, 1, init_values=0.5)}
LEAVES = (LayerNorm,)
PLACES = {vit.VisionTransformer: ("patch_embed.proj", "norm_pre", "norm", "fc_norm")}
LEFT = {
    "timm.models.vision_transformer.ResPostBlock": "normalises after each branch",
    "timm.models.vision_transformer.ParallelScalingBlock": "attention and MLP run side by side",
    "timm.models.vision_transformer.DiffParallelScalingBlock": "attention and MLP run side by side",
    "timm.models.vision_transformer.ParallelThingsBlock": "several attentions run side by side",
    "timm.models.vision_transformer_relpos.RelPosBlock": "relative position bias",
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock": "relative position bias",
    "timm.models.beit.Block": "relative position bias",
    "timm.models.eva.EvaBlock": _eva_unsupported,
    "timm.models.eva.EvaBlockPostNorm": _eva_unsupported,
    "timm.models.swin_transformer.SwinTransformerBlock": "windows with a relative position bias",
}
