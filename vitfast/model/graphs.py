"""The forward of a model in evaluation as CUDA graphs: one call makes all of its launches."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..errors import InputError
from ..kernels.tiles import batch_invariant
from ..ops.dispatch import current_mode
from ..ops.packed import PackedImages
from ..ops.patch_embed import holding_folds
from .variable_size import ManyImages, of_many_sizes, packed_images
from .vit import ViT

DEVICE = "cuda"
WARM_UP = 3  # runs before a capture, in which Dynamo and Triton compile and libraries allocate their workspaces
HARMLESS = ("vitfast.", "transformers.utils.output_capturing")  # modules whose hooks may be part of a graph
_capturing = threading.Lock()
_stream = functools.cache(lambda device: torch.cuda.Stream(device))  # of the captures on a device


def graphed(model: nn.Module, example: Tensor | ManyImages, *, most: int = 8) -> "Graphed":
    """Returns a function that computes model(images) in evaluation by CUDA graphs.

    model: a ViT, or any model whose forward takes one tensor, accelerated or compiled too. example: images of the size
    that is captured at once: floats or uint8, on the host or the GPU; for a ViT also images of many sizes. Each size
    that comes later gets a graph of its own. At most `most` are kept, those that were used last, in shared memory.
    Images of many sizes are filled up, by at most a fifth, to one of few sizes.

    An output is valid until the next call, which writes into the same memory: clone it to keep it. It has no gradients.
    Only one thread may call at a time. If a parameter or buffer was replaced, or changed in place, a call captures
    anew; but a change through `.data` is not noticed. Whatever else the forward reads (attributes, hooks, values of
    tensors as Python numbers) stays as it was at the capture.

    Raises InputError where the model or a module of it is in training mode, has hooks or is not on one GPU, and for
    images of many sizes where it does not pool; TypeError for other inputs.
    """
    run = Graphed(model, most=most)
    run(example)
    return run


class _Capture(NamedTuple):
    """A captured run, and all whose memory it reads or writes."""

    images: Tensor | PackedImages
    graph: Any  # torch.cuda.CUDAGraph
    outputs: Any
    state: list
    held: list


class Graphed:
    """The function that `graphed` returns. run: what is captured, by default the model."""

    def __init__(self, model: nn.Module, run: Callable | None = None, most: int = 8):
        if isinstance(most, bool) or not isinstance(most, int) or most < 1:
            raise InputError(f"graphed: most must be a whole number from 1, got {most!r}")
        if not isinstance(model, nn.Module):
            raise TypeError(f"graphed: model must be a module, got {type(model).__name__}")
        self.model, self.run, self.most = model, run or model, most
        self._captures: dict[tuple, _Capture] = {}  # the one that was used last is the last

    @torch.no_grad()
    def __call__(self, images: Tensor | ManyImages) -> Any:
        vit, count = getattr(self.model, "_orig_mod", self.model), None
        if isinstance(vit, ViT) and of_many_sizes(images):
            if self.run is self.model and not vit.global_pool:
                raise InputError("graphed: this ViT does not pool, so it takes images of one size, (B, C, H, W)")
            images = packed_images(vit, images)
            count = len(images)
        elif not isinstance(images, Tensor) or images.is_nested:
            many = ", or for a ViT images of many sizes"
            raise TypeError(f"graphed: images must be a tensor (B, C, H, W){many}, got {type(images).__name__}")
        mode = batch_invariant(), current_mode(), torch.is_autocast_enabled(DEVICE), torch.get_autocast_dtype(DEVICE)
        key = *_size(images), images.dtype, *mode
        if capture := self._captures.get(key):
            _fill(capture.images, images)
            capture.graph.replay()
        tensors = _tensors(self.model)  # while the GPU computes
        state = [(t.data_ptr(), 0 if t.is_inference() else t._version, t.dtype) for t in tensors]
        if capture is None or capture.state != state:
            capture = self._captured(images, tensors, state)
        self._captures.pop(key, None)
        self._captures[key] = capture
        if len(self._captures) > self.most:
            del self._captures[next(iter(self._captures))]
        return capture.outputs if count is None else capture.outputs[:count]

    def _captured(self, images: Tensor | PackedImages, tensors: list[Tensor], state: list) -> _Capture:
        pool = next((each.graph.pool() for each in self._captures.values()), None)  # it lives as long as a graph
        with torch.inference_mode(False), torch.no_grad():  # what is made in inference mode cannot be written outside
            static = _static(images, tensors[0].device)
            _fill(static, images)

            def run() -> Any:
                torch.clear_autocast_cache()  # or the graph reads what was cast before it, and others what it casts
                outputs = self.run(static)
                torch.clear_autocast_cache()
                return outputs

            with holding_folds() as folds:
                graph, outputs = _capture(run, static.device, pool)
            graph.replay()
        return _Capture(static, graph, outputs, state, [*(t.detach() for t in tensors), folds])


def _capture(run: Callable[[], Any], device: torch.device, pool: tuple | None) -> tuple[torch.cuda.CUDAGraph, Any]:
    """The graph of what run() does on a GPU, and the outputs that each replay writes."""
    graph, stream = torch.cuda.CUDAGraph(), _stream(device)
    with _capturing, torch.cuda.device(device):
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                run()
        torch.cuda.current_stream().wait_stream(stream)
        # Threads that read images may allocate memory meanwhile.
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            outputs = run()
    return graph, outputs


def check_device(what: str, *devices: torch.device) -> None:
    """Raises InputError unless a model that has tensors on these devices is on one GPU."""
    if [device.type for device in devices] != [DEVICE]:
        where = " and ".join(sorted(map(str, devices))) or "none"
        raise InputError(f"{what}: a model that runs as CUDA graphs must be on one GPU, and this one is on {where}")


def _tensors(model: nn.Module) -> list[Tensor]:
    """The parameters and buffers; InputError for a model in training, with hooks, or not on one GPU."""
    modules, tensors = [model], []
    for module in modules:  # the list grows; named_parameters would take several times as long
        hooks = module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks
        if module.training or any(hooks):
            every = itertools.chain(*(kind.values() for kind in hooks))
            hook = next((h for h in every if not getattr(h, "__module__", "").startswith(HARMLESS)), None)
            if module.training or hook:
                name = next(name for name, each in model.named_modules() if each is module) or "the model"
                why = "is in training mode; call eval()" if module.training else f"has a hook, {hook!r}; remove it"
                raise InputError(f"graphed: {name} {why}")
        tensors += (t for t in (*module._parameters.values(), *module._buffers.values()) if t is not None)
        modules += (each for each in module._modules.values() if each is not None)
    if _has_any_global_hook():
        raise InputError("graphed: a hook on all modules is set; remove it")
    check_device("graphed", *{t.device for t in tensors})
    return tensors


def rounded_up(count: int, bits: int = 3) -> int:
    """The least number from `count` on that has `bits` binary digits after the first, and then zeros."""
    step = 1 << max(0, count.bit_length() - 1 - bits)
    return -(-count // step) * step


def _size(images: Tensor | PackedImages) -> tuple[int, ...]:
    """The shape of images; of packed ones, filled up: how many, the longest, the patches' shape.

    It has so many images more that the patches that are more make none longer than the longest.
    """
    if isinstance(images, Tensor):
        return tuple(images.shape)
    N, S, longest = len(images.patches), len(images), images.longest
    slots = rounded_up(S + 1 + N // (8 * longest))
    return slots, 1 << (longest + 1).bit_length(), rounded_up(N + slots - S), *images.shape[1:]


def _static(images: Tensor | PackedImages, device: torch.device) -> Tensor | PackedImages:
    """Memory for images of this size; nothing may read the `counts` of packed ones."""
    if isinstance(images, Tensor):
        return torch.empty_like(images, device=device)
    (slots, longest, *shape), zeros = _size(images), functools.partial(torch.zeros, device=device)
    integers = (zeros(size, dtype=torch.int32) for size in (shape[0], slots + 1, (slots, 2)))
    return PackedImages(zeros(shape, dtype=images.dtype), *integers, (), longest)


def _fill(static: Tensor | PackedImages, images: Tensor | PackedImages) -> None:
    """Copies images into the static memory; other patches belong to images that nobody reads."""
    if isinstance(static, Tensor):
        static.copy_(images)
        return
    N, S, unused = len(images.patches), len(images), len(static) - len(images)
    static.patches[:N].copy_(images.patches)
    static.places.zero_()[:N].copy_(images.places)
    static.grids.fill_(1)[:S].copy_(images.grids)
    static.offsets[: S + 1].copy_(images.offsets)
    index = torch.arange(1, unused + 1, device=static.device)
    static.offsets[S + 1 :].copy_(N + index * (len(static.patches) - N) // unused)
