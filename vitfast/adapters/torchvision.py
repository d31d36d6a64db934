"""torchvision's VisionTransformer; its nn.MultiheadAttention holds q, k and v packed."""

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torchvision.models import vision_transformer as vit

from .. import ops
from ..ops.attention import unsupported_reason as head_unsupported
from ..submodules import Modules, layout
from .fused_blocks import FusedBlock, run, weights_and_biases


def _attention_unsupported(modules: Modules) -> str | None:
    attention = modules["self_attention"]
    extra = attention.bias_k is not None or attention.add_zero_attn
    if not attention.batch_first or extra or attention.in_proj_weight is None:
        return "self_attention is not batch-first self-attention alone"
    if attention.dropout > 0 and attention.training:
        return "attention dropout is active in training"
    return head_unsupported(attention.head_dim, 1.0)


ATTENTION = FusedBlock(
    "attention block",
    ops.attention_block,
    layout(
        {
            "ln_1": nn.LayerNorm,
            "self_attention": nn.MultiheadAttention,
            "self_attention.out_proj": NonDynamicallyQuantizableLinear,
            "dropout": nn.Dropout,
        }
    ),
    (
        *weights_and_biases("ln_1"),
        *(("self_attention", name) for name in ("in_proj_weight", "in_proj_bias")),
        *weights_and_biases("self_attention.out_proj"),
    ),
    options=lambda modules: dict(num_heads=modules["self_attention"].num_heads, eps=modules["ln_1"].eps),
    unsupported_reason=_attention_unsupported,
)

MLP = FusedBlock(
    "MLP block",
    ops.mlp_block,
    layout(
        {
            "ln_2": nn.LayerNorm,
            "mlp": vit.MLPBlock,
            "mlp.0": nn.Linear,
            "mlp.1": nn.GELU,
            "mlp.2": nn.Dropout,
            "mlp.3": nn.Linear,
            "mlp.4": nn.Dropout,
        }
    ),
    weights_and_biases("ln_2", "mlp.0", "mlp.3"),
    options=lambda modules: dict(eps=modules["ln_2"].eps, approximate=modules["mlp.1"].approximate),
)


class EncoderBlock(vit.EncoderBlock):
    """torchvision's pre-norm block; what a fused block cannot take goes through torchvision's own code."""

    fused_blocks = (ATTENTION, MLP)
    residual_in_fp32 = None

    def forward(self, input: Tensor) -> Tensor:
        if input.dim() != 3:
            return super().forward(input)  # which says what it expects
        x = run(ATTENTION, self, input)
        if x is None:
            h = self.ln_1(input)
            x = input + self.dropout(self.self_attention(h, h, h, need_weights=False)[0])
        y = run(MLP, self, x)
        return x + self.mlp(self.ln_2(x)) if y is None else y


BLOCKS = {EncoderBlock: lambda: vit.EncoderBlock(1, 16, 16, 0.0, 0.0)}
LEAVES = ()
PLACES = {vit.VisionTransformer: ("conv_proj",), vit.Encoder: ("ln",)}
LEFT = {}
