"""The sizes of a ViT and of its layers, and what a layer keeps for backward, without PyTorch."""

from typing import NamedTuple

from ..errors import InputError
from .config import ViTConfig, grid_size
from .presets import pair

MOST_PARAMETERS = 10**11  # four times the largest ViT; a mistyped size asks for far more
USABLE = 0.9  # share of the GPU's free memory for tensors; workspaces and fragments take the rest (assumed)


class BlockSizes(NamedTuple):
    """The sizes of an encoder layer on which depends what it keeps for backward."""

    width: int  # D
    heads: int
    hidden: int  # the inputs of the MLP's last layer, F
    before: int  # the outputs of its first layer: F, or 2F for up and gate
    inner_norm: bool  # whether a norm comes before the MLP's last layer
    norm_biases: bool  # whether norms are LayerNorms, which have a bias and keep each row's mean; RMSNorms do not
    residual_in_fp32: bool


def block_bytes(block: BlockSizes, rows: int, size: int, keep: str) -> dict[str, int]:
    """Bytes that a layer keeps of `rows` tokens, by kind; size: of an element; keep: "least" or "all"."""
    d, f = block.width, block.hidden
    statistics = 2 * (1 + block.norm_biases) + 2 * block.inner_norm  # mean (not of RMSNorm) and 1/std of each row, fp32
    least = {
        "residual stream": 2 * rows * d * (4 if block.residual_in_fp32 else size),  # the input of each fused block
        "statistics": statistics * rows * 4,
        "qkv": 3 * rows * d * size,
        "attention output": rows * d * size,
        "lse": rows * block.heads * 4,
        "pre-activation": rows * (block.before + block.inner_norm * f) * size,
    }
    return least | {"norms": 2 * rows * d * size, "activation": rows * f * size} if keep == "all" else least


def row_working_bytes(block: BlockSizes, size: int) -> int:
    """Bytes for each row that only the MLP's backward holds: gradients and the MLP's activation."""
    return block.width * (4 if block.residual_in_fp32 else size) + (block.before + block.hidden) * size


class Sizes:
    """The sizes of a ViT with these arguments.

    Raises InputError if the patch does not divide the images, and for more than MOST_PARAMETERS.
    """

    def __init__(self, config: ViTConfig):
        c = self.config = config
        self.prefix = int(c.class_token) + c.reg_tokens
        self.grid = grid_size(pair(c.img_size), pair(c.patch_size))
        self.patches = self.grid[0] * self.grid[1]
        # By default the norm comes after pooling where the patches are averaged.
        self.after_pooling = c.global_pool == "avg" if c.fc_norm is None else c.fc_norm
        self.head_width = c.representation_size or c.embed_dim
        hidden, norm_biases = int(c.embed_dim * c.mlp_ratio), c.norm_layer == "layernorm"
        widths = (c.embed_dim, c.num_heads, hidden, (1 + c.swiglu_mlp) * hidden)
        self.block = BlockSizes(*widths, c.scale_mlp_norm, norm_biases, c.residual_in_fp32)
        if c.backbone is None and (count := sum(self.parameters())) > MOST_PARAMETERS:
            sizes = ", ".join(f"{name}={getattr(c, name)}" for name in "embed_dim depth patch_size img_size".split())
            limit = f"at most {MOST_PARAMETERS:.0e} parameters, these would be {count:.0e}"
            raise InputError(f"ViT: the sizes must leave {limit} ({sizes}, ...)")

    @property
    def patch_values(self) -> int:
        """How many values a patch has."""
        height, width = pair(self.config.patch_size)
        return self.config.in_chans * height * width

    def parameters(self) -> tuple[int, int]:
        """How many numbers the parameters hold: those of linear layers and convolutions, and all others.

        Raises InputError for a hybrid, whose ResNet only timm knows.
        """
        if self.config.backbone is not None:
            raise InputError("the parameters of a hybrid's ResNet are counted on the model, not on its arguments")
        c, b, d = self.config, self.block, self.block.width
        norm = lambda width: width * (1 + b.norm_biases)  # noqa: E731
        layers = [(d, self.patch_values, not c.pre_norm)]
        layers += [(3 * d, d, c.qkv_bias), (d, d, c.proj_bias)] * c.depth
        layers += [(b.before, d, c.proj_bias), (d, b.hidden, c.proj_bias)] * c.depth
        each = 2 * norm(d) + 2 * norm(d // b.heads) * c.qk_norm + norm(b.hidden) * b.inner_norm
        each += 2 * d * bool(c.init_values)
        others = c.depth * each + self.prefix * d + self._positions() + norm(d) * (1 + c.pre_norm)
        if c.global_pool == "map":
            layers += [(d, d, True), (2 * d, d, True), (d, d, True), (b.hidden, d, True), (d, b.hidden, True)]
            others += d + norm(d)
        if c.representation_size:
            layers.append((self.head_width, d, True))
        if c.num_classes:
            layers.append((c.num_classes, self.head_width, True))
        return sum(outputs * (inputs + bias) for outputs, inputs, bias in layers), others

    def _positions(self) -> int:
        """How many numbers the learned position tables hold."""
        c, d = self.config, self.block.width
        if c.pos_embed == "relative":
            return c.depth * (2 * self.patches - 1) * (d // self.block.heads)
        slots, sides = self.patches + (0 if c.no_embed_class else self.prefix), sum(self.grid)
        table = dict(learn=slots * d, learn2d=sides * (d // 2), factorized=sides * d).get(c.pos_embed, 0)
        return table * (c.depth if c.pos_embed_at == "layers" else 1)
