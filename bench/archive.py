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


def compiles(name: str) -> bool:
    """Whether a rival's name gives kernels of ours for this generation, or choices between them."""
    chosen = [part.split("=") for part in name.split(" | ")[1:] if not part.startswith("pdl")]
    return all(provider not in ("cublas", "cublaslt") and configuration(op, provider) for op, provider in chosen)


def launches_of(rivals: "Rivals") -> "list[Launch]":
    """Our launches in the operation or the models whose rivals are compared."""
    preset, image, batch = rivals.shape.split(" ")
    if rivals.operation:
        op, s = rivals.operation[0], Sizes.of_preset(preset, int(batch[1:]), int(image))
        return operations(s, [torch.bfloat16], [op]) if op in cases(s, ops) else []  # others launch no kernel of ours
    amp, train = any(name.endswith(" amp") for name in rivals.names), rivals.what == "train"
    models = [model(preset, int(image), train, amp)]
    if amp:  # timm's residual stream
        models.append(model(preset, int(image), train, amp, residual_in_fp32=True))
    batches = (64, 128, 256, 512) if rivals.what == "throughput" else (int(batch[1:]),)
    images = torch.float32 if amp else torch.bfloat16
    return [launch for vit in models for count in batches for launch in step(vit, count, images)]


def queue(sm: int) -> "list[Launch]":
    """The launches of the questions on a GPU of this generation."""
    found, bf16 = [*resize().values()], torch.bfloat16
    with tiles.using(sm=sm), launching_on_meta():
        found += operations(doctor.GPU_SIZES, [torch.float32, torch.float16, bf16])
        for rivals in (question.run for question in QUEUE if isinstance(question.run, Rivals)):
            # libraries have no kernels to compile, and some providers are another generation's
            variants = {"".join(name.partition(" | ")[1:]) for name in rivals.names}
            for name in sorted(name for name in variants if compiles(name)):
                with overridden(name):
                    found += launches_of(rivals)
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
    count = packing.write_archive(args.archive, args.sm, queue(args.sm), [q.name for q in QUEUE], args.jobs)
    print(f"{count} kernels for sm_{args.sm}: {args.archive}, {args.archive.stat().st_size / 2**20:.1f} MiB")


if __name__ == "__main__":
    sys.exit(main())
