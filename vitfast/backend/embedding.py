"""Proposes ops.patch_embed: patches of floats or of uint8 images, prefix tokens and positions."""

import itertools
import operator
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .. import ops
from ..model.presets import pair
from .arguments import patch_weight, patches_as_image, per_channel, prefix_and_positions, whole_patches
from .graph import Call, Candidate, Positions, Proposal
from .nodes import ADDS, ANALYTIC, CASTS, REARRANGEMENTS, VALUE_FREE, argument, is_draw, name_of, shape_of, tensor_of
from .parts import linear_of


class _Step(NamedTuple):
    """A step of prefix_and_positions, and the nodes that repeat its tokens for every image."""

    kind: str
    tokens: Node
    repeated: list[Node]


def patch_embeddings(positions: Positions, node: Node) -> Iterator[Candidate]:
    """Proposes a patch embedding for regions around a projection of patches, the longest region first.

    node: a convolution whose stride is its kernel, or a linear layer on patches; nothing is proposed for others."""
    if name_of(node) == "conv2d":
        images, weight, bias = node.args[0], argument(node, 1, "weight"), argument(node, 2, "bias")
        kernel, stride = (shape_of(weight) or ())[2:], argument(node, 3, "stride", 1)
        if tuple(kernel) != (tuple(stride) if isinstance(stride, (tuple, list)) else (stride,) * 2) or kernel == (1, 1):
            return
        weights = [lambda call: weight]
    elif (layer := _linear_of_patches(node)) is not None:
        images, weight, bias, weights = layer
    else:
        return
    if shape_of(images) is None:
        return
    source, chain = _normalisation(images)
    cropped = name_of(node) == "conv2d" and any(n % side for n, side in zip(shape_of(images)[-2:], kernel))
    for end, steps in reversed(_tokens(node, shape_of(weight)[0])):
        repeated = {n for step in steps for n in step.repeated}
        nodes = positions.between(source, end)
        if nodes and repeated.isdisjoint(nodes):
            region = positions.around([*nodes, *repeated], source)
            yield region, _proposals(source, chain, cropped, weights, bias, steps)
    if name_of(node) == "conv2d" and (nodes := positions.between(source, node)):
        yield positions.around(nodes, source), _proposals(source, chain, cropped, weights, bias, [], as_image=True)


def _proposals(
    source: Node, chain: list[Node], cropped: bool, weights, bias, steps: list[_Step], as_image: bool = False
) -> Iterator[Proposal]:
    """Proposes one patch embedding for each of the weights that the projection may have as a convolution.

    chain: the nodes that normalise uint8 images. cropped: whether the convolution leaves out rows or columns of the
    images. as_image: whether the region ends in the convolution, so that its output is (B, D, H / P, W / Q)."""

    def build(weight, call):
        layer = [weight(call), bias]
        if chain:
            both = call(per_channel, *layer, *(_normalised(call, source, chain, pixel) for pixel in (0, 255)))
            layer = [call(operator.getitem, both, i) for i in (0, 1)]
        if steps:
            both = call(prefix_and_positions, [(step.kind, step.tokens) for step in steps])
            layer += [call(operator.getitem, both, i) for i in (0, 1)]
        images = call(whole_patches, source, layer[0]) if cropped else source
        tokens = call(ops.patch_embed, images, *layer)
        return call(patches_as_image, tokens, images, layer[0]) if as_image else tokens

    for weight in weights:
        yield Proposal("patch projection" if as_image else "patch embedding", partial(build, weight))


def _linear_of_patches(node: Node) -> tuple | None:
    """Returns (images, weight (D, C P Q), bias, weights) of a linear layer on patches of images, or None.

    weights: functions of `call`, one for each convolution that the layer may be, that write its weight."""
    if (layer := linear_of(node)) is None or name_of(node) != "linear":
        return None
    images, weight, passed = layer.x, layer.weight, []
    while images is not None and name_of(images) in REARRANGEMENTS and len(images.all_input_nodes) == 1:
        passed.append(images)
        images = images.args[0]
    shape = shape_of(images) or ()
    if not passed or len(shape) != 4 or shape[1] < 1 or layer.columns % shape[1] or layer.columns == shape[1]:
        return None
    chans, area = shape[1], layer.columns // shape[1]
    sides = [(p, area // p) for p in range(1, area + 1) if area % p == 0]
    sizes = [(chans, *patch) for patch in sides if any(_cuts(node, shape[2:], patch) for node in passed)]
    both = itertools.product(sizes, itertools.permutations(range(3)))
    weights = [lambda call, sizes=sizes, order=order: call(patch_weight, weight, sizes, order) for sizes, order in both]
    return (images, weight, layer.bias, weights) if weights else None


def _cuts(node: Node, image: tuple[int, int], patch: tuple[int, int]) -> bool:
    """Whether a rearrangement of images has axes as long as a patch and their number, or is F.unfold."""
    shape = shape_of(node) or ()
    if any(side % p for side, p in zip(image, patch)):
        return False
    if name_of(node) == "unfold" and len(shape) == 3:
        return patch == pair(argument(node, 1, "kernel_size"))
    axes = Counter(patch) + Counter(side // p for side, p in zip(image, patch))
    return not axes - Counter(shape[1:])


def _normalisation(images: Node) -> tuple[Node, list[Node]]:
    """Returns the uint8 images behind `images` and the nodes that normalise them; else (images, [])."""
    chain, node = [], images
    while tensor_of(node) is not None and tensor_of(node).dtype != torch.uint8 and len(chain) < 20:
        same = [a for a in node.all_input_nodes if shape_of(a) == shape_of(images)]
        if len(same) != 1 or name_of(node) not in ANALYTIC - REARRANGEMENTS:
            return images, []
        chain, node = [node, *chain], same[0]
    return (node, chain) if tensor_of(node) is not None and tensor_of(node).dtype == torch.uint8 else (images, [])


def _normalised(call: Call, source: Node, chain: list[Node], pixel: int) -> object:
    """Writes what normalising nodes make of one grey value, for each channel: (1, C, 1, 1)."""
    shape, device = (1, shape_of(source)[1], 1, 1), tensor_of(source).device
    values = {source: call(torch.full, shape, pixel, dtype=torch.uint8, device=device)}
    for node in chain:
        arguments, keywords = map_arg((node.args, node.kwargs), lambda a: values.get(a, a))
        function = getattr(Tensor, node.target) if node.op == "call_method" else node.target
        values[node] = call(function, *arguments, **keywords)
    return values[chain[-1]]


def _tokens(node: Node, width: int) -> list[tuple[Node, list[_Step]]]:
    """Returns the nodes after a projection that are tokens (B, T + N, D), with the steps up to each."""
    ends, steps = [], []
    while True:
        shape = shape_of(node) or ()
        if len(shape) == 3 and shape[-1] == width:
            ends.append((node, list(steps)))
        users = [user for user in node.users if name_of(user) not in VALUE_FREE]
        if len(users) != 1:
            return ends
        (user,) = users
        name = name_of(user)
        if name == "cat" and len(shape) == 3:
            tensors, axis = argument(user, 0, "tensors"), argument(user, 1, "dim", 0)
            if axis not in (1, -2) or tensors[-1] is not node or node in tensors[:-1]:
                return ends
            pieces = [_unrepeated(piece) for piece in tensors[:-1]]
            if any(not _for_one_image(shape_of(tokens)) for tokens, _ in pieces):
                return ends
            steps += [_Step("prefix", *piece) for piece in reversed(pieces)]
        elif name in ADDS and len(user.all_input_nodes) == 2 and len(shape) == 3:
            (other,) = (a for a in user.all_input_nodes if a is not node)
            if shape_of(other) not in ((1, *shape[1:]), shape[1:]):
                return ends
            steps.append(_Step("positions", other, []))
        elif name not in REARRANGEMENTS | CASTS and ("dropout" not in name or is_draw(user)):
            return ends
        node = user


def _for_one_image(shape: tuple | None) -> bool:
    """Whether tokens of this shape are the same for every image: (D,), (1, D) or (1, T, D)."""
    return shape is not None and (len(shape) == 1 or (len(shape) <= 3 and shape[0] == 1))


def _unrepeated(node: Node) -> tuple[Node, list[Node]]:
    """Returns prefix tokens as one image has them, and the nodes that repeat them for all images."""
    repeated = []
    while name_of(node) in CASTS | {"expand", "repeat"} and isinstance(node.args[0], Node):
        repeated.append(node)
        node = node.args[0]
    return node, repeated
