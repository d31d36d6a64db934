"""Questions on kernels whose instructions were counted, not timed: what ships beside its rival.

At the power limit each instruction costs time, so fewer should be faster; `tests/codegen.csv` has the counts. Rivals
are timed back to back, with power and clock beside them. The loser leaves. A whole step with the winners is in
questions.py.
"""

from asking import Prediction, Question, Rivals, faster

B16, BF16, TIMM = "B/16 224 B256", "vitfast compile bf16", "timm compile bf16"
MATMUL = ("kernels/matmul/*.py", "kernels/rows.py")
ATTENTION = ("kernels/attention/*.py", "kernels/rows.py")
PATCHES = "kernels/patch_embed/*.py"
BLOCKS = ("vitfast/ops/*.py", "vitfast/model/*.py")


def counted(
    name: str, asks: str, what: str, rivals: str, says: str, least: float, no: str, worth: float, files: tuple[str, ...]
) -> Question:
    """Whether what ships is faster than its rivals: "OPERATION=PROVIDER", with commas between them."""
    ours = BF16 if what == "train" else "vitfast"
    names = (ours, *(f"{ours} | {rival}" for rival in rivals.split(", ")))
    seconds, answer = 75 if what == "train" else 40, Prediction(says, faster(ours), least=least)
    return Question(name, asks, Rivals(what, B16, names), answer, (f"{rivals} leaves", no), seconds, files, worth)


def candidate(
    name: str, asks: str, what: str, rival: str, says: str, least: float, yes: str, worth: float, files: tuple[str, ...]
) -> Question:
    """Whether a candidate, "OPERATION=PROVIDER", is so many times as fast as what ships."""
    ours = BF16 if what == "train" else "vitfast"
    names = (ours, f"{ours} | {rival}")
    seconds, answer = 75 if what == "train" else 40, Prediction(says, faster(*reversed(names)), least=least)
    return Question(name, asks, Rivals(what, B16, names), answer, (yes, f"{rival} leaves"), seconds, files, worth)


COUNTED = (
    counted(
        "one_loop_fc1",
        "fc1 + GELU: is one loop, whose sums start at the bias, faster than two that Triton flattens?",
        "linear_gelu forward",
        "linear_gelu_fwd=flattened",
        "515 us become 465: 14 instructions an element in place of 19 with the same GELU, of 23 with the one before",
        1.03,
        "the flattened loop ships again",
        0.5,
        MATMUL,
    ),
    counted(
        "one_loop_residual",
        "fc2 + residual: the same, with the residual read ahead?",
        "mlp_block forward",
        "linear_residual_fwd=flattened",
        "its 329 us become 320, in a block of 880: 6 instructions an element in place of 11",
        1.0,
        "the flattened loop ships again",
        0.3,
        MATMUL,
    ),
    counted(
        "one_loop_dgelu",
        "dGELU: is one program a multiprocessor, which reads pre ahead, faster than two with a prologue each?",
        "train",
        "dgelu_matmul=tma",
        "its 569 us become 480, a step 1.5 % shorter: 19 instructions an element in place of 24",
        1.003,
        "descriptors and a program for each block ship again, in two pieces",
        1.1,
        (*MATMUL, *BLOCKS),
    ),
    candidate(
        "slope_kept",
        "Is a step faster where the MLP keeps GELU's slope in place of its input?",
        "train",
        "mlp_kept=slope",
        "60 us a layer, 1.3 % of a step: fc1 six instructions an element more, dGELU fourteen fewer",
        1.0127,
        '"slope" is what keep="all" keeps',
        0.8,
        (*MATMUL, *BLOCKS),
    ),
    counted(
        "attention_boxes",
        "Attention's forward: are queries and outputs by TMA faster than by pointers?",
        "attention forward",
        "attention_fwd=single_pass",
        "171 us become 165: 820 instructions for 64 queries in place of 883, and 984 with the exponential before",
        1.0,
        "pointers ship again",
        0.1,
        ATTENTION,
    ),
    candidate(
        "attention_roles",
        "Attention's backward: are four warpgroups with roles, in Gluon, right, and faster than four warps without?",
        "attention backward",
        "attention_bwd=specialized",
        "393 us, less 1 % by the folded logarithm, become 300: 14 full waits in a row in place of 84",
        1.1,
        "specialized ships for 193 to 207 tokens",
        1.0,
        ATTENTION,
    ),
    counted(
        "patches_of_bytes",
        "uint8 patches, an instruction a pixel: is our kernel faster than unfold + cuBLAS, and which of its tiles?",
        "patch_embed uint8 forward",
        "patch_embed_fwd=cublas, patch_embed_fwd=triton",
        "1.1 times cuBLAS's; the tile of 128 k, with 11 instructions a number of the result in place of 15, is faster",
        1.0,
        "the fastest of the three ships",
        0.1,
        PATCHES,
    ),
)
