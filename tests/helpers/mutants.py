"""Bugs put into copies of the kernels, one each, for the sanitizer to find."""

import contextlib
import importlib
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


NUMBERS = "wrong numbers"


@dataclass(frozen=True)
class Mutant:
    """`old` is replaced by `new` where it first occurs in a file of kernels/. The launcher `name` then gives `kind` of finding.

    Of kind NUMBERS it gives no finding but wrong results, where the plan reaches what is wrong.
    silent: all results stay right, so that no test of numbers sees the bug.
    """

    what: str
    file: str
    old: str
    new: str
    name: str
    kind: str
    silent: bool = False

    @contextlib.contextmanager
    def made(self, folder: Path) -> Iterator[ModuleType]:
        """vitfast.verify.edges of a copy in `folder` that has the bug."""
        package = "mutant_" + re.sub(r"\W+", "_", self.what)
        copy = folder / package
        shutil.copytree(ROOT / "kernels", copy / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
        # What vitfast.verify.edges needs beside the kernels: copied too, so that it imports the copy's kernels.
        shutil.copytree(ROOT / "vitfast" / "verify", copy / "verify", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "vitfast" / "ref.py", copy)
        (copy / "__init__.py").touch()
        path = copy / "kernels" / self.file
        text = path.read_text()
        assert self.old in text, f"{self.what}: {self.file} has changed"
        path.write_text(text.replace(self.old, self.new, 1))
        sys.path.insert(0, str(folder))
        try:
            yield importlib.import_module(f"{package}.verify.edges")
        finally:
            sys.path.remove(str(folder))
            for module in [name for name in sys.modules if name.partition(".")[0] == package]:
                del sys.modules[module]


_STORE_CHUNK = "ptr + rows.to(tl.int64) * D + offs_d"
_LAST_KEYS = "        acc, l, m = _fwd_step(acc, l, m, q_tile, k_head, v_head, whole, N, scale, LAST_N, "
_GRID = "(cdiv(m, blocks[0]) * cdiv(n, blocks[1]),)"
_SHORT_GRID = "(max(1, m // blocks[0]) * cdiv(n, blocks[1]),)"
_DQ = "common = _common(scale, q=q, k=k, v=v, o=o, do=do, dq={})\n    common |="
_DELTA = "do=do, dk=dk, dv=dv)\n    common |= dict(lse_ptr=lse, delta_ptr="

MUTANTS = [
    # Bounds: of rows, of columns, before the start, through a descriptor, of what lies beside in the same storage.
    Mutant(
        "a row past M",
        "rows.py",
        "        return rows < M\n",
        "        return rows <= M\n",
        "layer_norm",
        "out of bounds",
    ),
    Mutant(
        "a column past D",
        "rows.py",
        "[None, :] < D)\n\n\n",
        "[None, :] <= D)\n\n\n",
        "layer_norm backward",
        "out of bounds",
    ),
    Mutant(
        "a column past the head: k beside q",
        "attention_parts.py",
        "in_rows[:, None] & (FIRST + tl.arange(0, SIZE) < HEAD.dim)[None, :]",
        "in_rows[:, None] & (FIRST + tl.arange(0, SIZE) <= HEAD.dim)[None, :]",
        "attention",
        "out of bounds",
    ),
    Mutant(
        "the last block of keys unmasked",
        "attention_tiled.py",
        _LAST_KEYS + "True",
        _LAST_KEYS + "False",
        "attention",
        "out of bounds",
    ),
    Mutant(
        "lse of a query past N",
        "attention_tiled_bwd.py",
        "delta_row + rows, mask=rows < N,",
        "delta_row + rows, mask=rows <= N,",
        "attention backward, dk and dv",
        "out of bounds",
    ),
    Mutant(
        "a row of the workspace too many",
        "rows.py",
        "        P=programs,\n",
        "        P=programs + 1,\n",
        "sum of rows",
        "out of bounds",
    ),
    Mutant(
        "a sum past D",
        "rows.py",
        "tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=offs_d < D",
        "tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=offs_d <= D",
        "sum of rows",
        "out of bounds",
    ),
    Mutant(
        "a split too many",
        "patch_embed_bwd.py",
        "in range(splits)",
        "in range(splits + 1)",
        "patch embedding backward",
        "out of bounds",
    ),
    Mutant(
        "rows before the first",
        "patch_embed_bwd.py",
        "if token >= prefix:",
        "if token >= 0:",
        "patch embedding backward",
        "out of bounds",
    ),
    Mutant(
        "factors of the next image",
        "rows.py",
        "rows // rows_per_sample,",
        "rows // rows_per_sample + 1,",
        "add + layer_norm, factors",
        "out of bounds",
    ),
    Mutant(
        "a descriptor a row too long",
        "product.py",
        "TensorDescriptor(x, list(x.shape),",
        "TensorDescriptor(x, [x.shape[0] + 1, x.shape[1]],",
        "linear, qkv",
        "out of bounds",
    ),
    Mutant(
        "bias of a column past N",
        "product.py",
        "mask=offs_n < N, other",
        "mask=offs_n <= N, other",
        "linear + gelu",
        "out of bounds",
    ),
    # Two programs write one element.
    Mutant(
        "all splits into one slice",
        "weight_grad.py",
        "split.to(tl.int64) * stride_os",
        "split.to(tl.int64) * 0",
        "weight gradient, fc1",
        "write-write race",
    ),
    Mutant(
        "the sums of two heads in one slot",
        "attention_parts.py",
        "* H + h) * HEAD.dim",
        "* H + h // 2) * HEAD.dim",
        "attention backward",
        "write-write race",
    ),
    Mutant(
        "tiles of queries that overlap",
        "attention_tiled_bwd.py",
        "place * BLOCK_M, N, scale, HEAD, BLOCK_M, BLOCK_N, LAST_N\n",
        "place * (BLOCK_M - 1), N, scale, HEAD, BLOCK_M, BLOCK_N, LAST_N\n",
        "attention backward, dq",
        "write-write race",
        True,
    ),
    Mutant(
        "prefix tokens a row too far",
        "patch_embed.py",
        "(prefix + layout.patches) + token)",
        "(prefix + layout.patches) + token + 1)",
        "patch embedding",
        "write-write race",
    ),
    Mutant(
        "rows shared by two programs",
        "rows.py",
        "tl.num_programs(0) * BLOCK_M",
        "tl.num_programs(0)",
        "scaled rows",
        "write-write race",
    ),
    Mutant(
        "a row tile of sums for two",
        "mlp.py",
        "part_ptr + pid_m.to(tl.int64) * N",
        "part_ptr + (pid_m // 2).to(tl.int64) * N",
        "dgelu",
        "write-write race",
    ),
    # One program reads what another writes.
    Mutant("dQ over K", "attention.py", _DQ.format("dq"), _DQ.format("k"), "attention backward, dq", "read-write race"),
    Mutant(
        "o over V",
        "attention.py",
        "k=k, v=v, o=o) | dict(lse_ptr=lse)",
        "k=k, v=v, o=v) | dict(lse_ptr=lse)",
        "attention",
        "read-write race",
    ),
    # A program reads or writes again what its other threads wrote.
    Mutant(
        "no barrier between the phases",
        "attention_tiled_bwd.py",
        "    tl.debug_barrier()\n",
        "",
        "attention backward",
        "missing barrier",
        True,
    ),
    Mutant(
        "no barrier between the parts of keys",
        "attention_head_bwd.py",
        "            tl.debug_barrier()\n\n        dq_sums",
        "\n        dq_sums",
        "attention backward",
        "missing barrier",
        True,
    ),
    Mutant(
        "no barrier before the next head",
        "attention_head_bwd.py",
        "have read\n        tl.debug_barrier()\n",
        "have read\n",
        "attention backward",
        "missing barrier",
        True,
    ),
    Mutant(
        "a scratch for two programs",
        "attention_head_bwd.py",
        "dq_acc_ptr + pid *",
        "dq_acc_ptr + pid // 2 *",
        "attention backward",
        "write-write race",
    ),
    Mutant(
        "no barrier before the parts of keys",
        "attention_head_bwd.py",
        "        tl.debug_barrier()\n\n        for first",
        "\n        for first",
        "attention backward",
        "missing barrier",
        True,
    ),
    Mutant(
        "rows one element short",
        "rows.py",
        _STORE_CHUNK,
        _STORE_CHUNK.replace("* D", "* (D - 1)"),
        "layer_norm",
        "missing barrier",
    ),
    # Lanes of one store disagree.
    Mutant(
        "two rows in one",
        "mlp.py",
        "at = offs_m[:, None] * stride_om",
        "at = offs_m[:, None] // 2 * stride_om",
        "linear + gelu",
        "two values",
    ),
    Mutant(
        "patches one pixel short",
        "patches.py",
        "(x * AXES.k2)",
        "(x * (AXES.k2 - 1))",
        "patch embedding backward",
        "two values",
    ),
    # Never written.
    Mutant("a grid one row tile short", "product.py", _GRID, _SHORT_GRID, "linear + residual, fc2", "left unwritten"),
    Mutant(
        "a row of the workspace for nobody",
        "layer_norm_bwd.py",
        "torch.empty((programs, D)",
        "torch.empty((programs + 1, D)",
        "layer_norm backward",
        "left unwritten",
        True,
    ),
    Mutant(
        "the last mean",
        "layer_norm.py",
        "mean_ptr + rows, mean, mask=rows < M",
        "mean_ptr + rows, mean, mask=rows < M - 1",
        "layer_norm",
        "left unwritten",
    ),
    Mutant(
        "the last lse",
        "attention_rows.py",
        "m + tl.log2(l) * LN2, mask=rows < N)",
        "m + tl.log2(l) * LN2, mask=rows < N - 1)",
        "attention",
        "left unwritten",
    ),
    # Read before it is written.
    Mutant(
        "delta of nobody",
        "attention.py",
        _DELTA + "delta",
        _DELTA + "torch.empty_like(lse)",
        "attention backward, dk and dv",
        "uninitialised read",
    ),
    Mutant(
        "the last folded weight",
        "patch_embed.py",
        "channel_values(channel, SCALES)).to(folded_ptr.dtype.element_ty), mask=k < K",
        "channel_values(channel, SCALES)).to(folded_ptr.dtype.element_ty), mask=k < K - 1",
        "patch embedding, uint8",
        "uninitialised read",
    ),
    # Hints.
    Mutant(
        "a hint of 16 for heads of 72",
        "attention.py",
        "1 if misaligned % 8 else 8,",
        "1 if misaligned % 8 else 16,",
        "attention",
        "false hint",
        True,
    ),
    Mutant(
        "a hint for the rows of odd tensors",
        "attention.py",
        "1 if misaligned % 8 else 8,",
        "8,",
        "attention",
        "false hint",
        True,
    ),
    Mutant(
        "an atomic sum",
        "rows.py",
        "tl.store(sum_ptr + tl.program_id(0)",
        "tl.atomic_add(sum_ptr + tl.program_id(0)",
        "sum of rows",
        "atomic operation",
    ),
    # Of what only some of the plan reaches: loops that go round twice, strides of their own, several images, options.
    Mutant(
        "one tile of queries",
        "attention_rows.py",
        "range(0, query_tiles,",
        "range(0, 1,",
        "attention",
        "left unwritten",
    ),
    Mutant("zeros that nobody asked for", "rows.py", "BLOCK_D), other=0.0)", "BLOCK_D))", "layer_norm", NUMBERS),
    Mutant(
        "the last rows' dweight",
        "layer_norm_bwd.py",
        "dw = _add(dw, dw_more, CHUNKS)",
        "dw = dw_more",
        "layer_norm backward",
        NUMBERS,
    ),
    Mutant(
        "one slice of dweight",
        "patch_embed_bwd.py",
        "        partial_ptrs += D * K\n",
        "",
        "patch embedding backward",
        NUMBERS,
    ),
    Mutant(
        "always the first images",
        "patch_embed.py",
        "(block - blocks) // prefix * BLOCK_M",
        "0 * BLOCK_M",
        "patch embedding",
        "left unwritten",
    ),
    Mutant(
        "channels of another order",
        "patches.py",
        "(0, 2, 3, 1), 1)",
        "(0, 2, 3, 1), 2)",
        "patch embedding, uint8, oblong, no prefix",
        NUMBERS,
    ),
    Mutant(
        "row tiles of one group",
        "product.py",
        "first = pid // (GROUP_M * tiles_n) * GROUP_M",
        "first = 0",
        "linear + gelu",
        "write-write race",
    ),
    Mutant(
        "v by the strides of k",
        "attention_rows.py",
        "head_of(v, b, h, HEAD)",
        "head_of((v[0], k[1]), b, h, HEAD)",
        "attention, peaked, separate tensors",
        "out of bounds",
    ),
    Mutant(
        "a barrier for the sums alone",
        "attention_tiled_bwd.py",
        "    tl.debug_barrier()\n",
        "    if SUMS:\n        tl.debug_barrier()\n",
        "attention backward, separate tensors",
        "missing barrier",
        True,
    ),
    Mutant(
        "dQ of the last part alone",
        "attention_head_bwd.py",
        "if before:",
        "if rows is None:",
        "attention backward",
        NUMBERS,
    ),
    Mutant(
        "k for q in the box",
        "attention_head_bwd.py",
        "qkv_rest, b, h, rows",
        "qkv_rest, b, H + h, rows",
        "attention backward",
        NUMBERS,
    ),
    Mutant(
        "statistics of whole tiles alone",
        "attention_head_bwd.py",
        "tl.store(stat[1] + rows, ndelta)",
        "tl.store(stat[1] + rows, ndelta, mask=rows < N)",
        "attention backward",
        "uninitialised read",
    ),
    Mutant(
        "a misaligned descriptor", "product.py", " and x.data_ptr() % 16 == 0 and", " and", "linear + gelu", NUMBERS
    ),
]
