"""Compiles ahead, without a GPU, the kernels that the questions of questions.py launch.

    python bench/archive.py bench/cache/sm90.tar.xz [--sm 90] [--jobs 2]

The archive is good for the Triton and the Python that make it, and for these kernels (vitfast/kernels/archives.py): run
it by Python 3.12 and Triton 3.6 for a machine that has these. It has the kernels of the questions with rivals, of the
benchmarks that questions run, and of doctor. The GPU tests need a thousand more, and compile them within their own
seconds.
"""

import argparse
import sys
from pathlib import Path

if __name__ != "__mp_main__":  # the processes that compile, which import this file too, need none of it
    import torch
    from asking import Rivals
    from decide import covered
    from questions import QUEUE
    from rivals import configuration, overridden

    from vitfast import ops
    from vitfast.kernels import tiles
    from vitfast.kernels.launch import Launch, record
    from vitfast.tools import doctor
    from vitfast.tools.machine_code import packing
    from vitfast.tools.machine_code.model_launches import META, launching_on_meta, model, resize, step
    from vitfast.tools.verify import cases, run
    from vitfast.tools.verify.draw import Draw, Sizes


def operations(s: "Sizes", dtypes: "list[torch.dtype]", names: list[str] | None = None) -> "list[Launch]":
    """The launches of doctor's cases: forward without gradients, then forward and backward."""
    found = []
    for name, (function, inputs) in cases(s, ops).items():
        for dtype in dtypes if names is None or name in names else ():
            tensors = Draw(dtype, META).leaves(inputs)

            def both_ways(function=function, tensors=tensors):
                with torch.no_grad():
                    function(*tensors)
                return run(function, tensors, [torch.empty_like(o) for o in run(function, tensors)])

            found += record(both_ways)
    return found


def fp32_stream(s: "Sizes") -> "list[Launch]":
    """The launches of the two blocks where timm's fp32 residual stream is kept under autocast."""
    found = []
    for name, options in (("attention_block", dict(num_heads=s.heads)), ("mlp_block", {})):
        x, w, b, *matrices = Draw(torch.bfloat16, META).leaves(cases(s, ops)[name][1])[:7]
        stream = [t.detach().float().requires_grad_() for t in (x, w, b)]
        for keep in ("least", "all"):

            def both(name=name, tensors=(*stream, *matrices), options=options | dict(keep=keep)):
                out = getattr(ops, name)(*tensors, residual_in_fp32=True, **options)
                out.backward(torch.empty_like(out))

            found += record(both)
    return found


def compiles(name: str) -> bool:
    """Whether a rival's name gives kernels of ours for this generation, or choices between them."""
    chosen = [part.split("=") for part in name.split(" | ")[1:]]
    return all(provider not in ("cublas", "cublaslt") and configuration(op, provider) for op, provider in chosen)


def launches_of(rivals: "Rivals", s: "Sizes") -> "list[Launch]":
    """The launches of what rivals are compared in, ours alone."""
    if rivals.operation:
        op, _ = rivals.operation
        return operations(s, [torch.bfloat16], [op]) if op in cases(s, ops) else []  # others launch nothing of ours
    preset, image, _ = rivals.shape.split(" ")
    amp, train = any(name.endswith(" amp") for name in rivals.names), rivals.what == "train"
    found = fp32_stream(s) if amp else []
    for count in (s.batch,) if train else (1, 64, 128, 256, 512):
        found += step(model(preset, int(image), train, amp), count, torch.float32 if amp else torch.bfloat16)
    return found


def queue(sm: int) -> "list[Launch]":
    """The launches of the questions on a GPU of this generation."""
    found, bf16, fp32 = [*resize().values()], torch.bfloat16, torch.float32
    with tiles.using(sm=sm), launching_on_meta():
        found += operations(doctor.GPU_SIZES, [fp32, torch.float16, bf16])
        for rivals in (question.run for question in QUEUE if isinstance(question.run, Rivals)):
            preset, image, batch = rivals.shape.split(" ")
            s = Sizes.of_preset(preset, int(batch[1:]), int(image))
            # libraries have no kernels to compile, and some providers are another generation's
            names = {name[name.find(" | ") :] if " | " in name else "" for name in rivals.names}
            for name in sorted(name for name in names if compiles(name)):
                with overridden(name):
                    found += launches_of(rivals, s)
        found += step(model("S/16", 224, True, False), 128)  # the losses
        for train, dtype in ((False, torch.uint8), (False, bf16), (True, torch.uint8)):  # embed, from files
            for amp in (False, True):
                found += step(model("B/16", 224, train, amp), 256, dtype)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("archive", type=Path)
    parser.add_argument("--sm", type=int, default=90, help="compute capability of the GPU: 90 is an H100's or H200's")
    parser.add_argument("--jobs", type=int, default=2, metavar="N", help="processes")
    args = parser.parse_args()
    names = [covered(question.name) for question in QUEUE if question.compiled_ahead]
    count = packing.write_archive(args.archive, args.sm, queue(args.sm), names, args.jobs)
    print(f"{count} kernels for sm_{args.sm}: {args.archive}, {args.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    sys.exit(main())
