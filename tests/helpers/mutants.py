"""The bugs that the plan of edges is to find, by the exact text of the kernels.

Each has three lines: its name, the launcher that shows it and the file in kernels/; then the text and what it becomes
where it first occurs, with \\n for the end of a line. A comment names the kind of those below it. Of the kind "wrong
numbers" the sanitizer finds nothing; of "silent" ones all results stay right, so that no test of numbers sees them.
"""

from mutant import Mutant, listed

BUGS = r"""
# out of bounds
a row past M | layer_norm | rows.py
- return rows < M\n
+ return rows <= M\n
a column past D | layer_norm backward | rows.py
- [None, :] < D)\n\n\n
+ [None, :] <= D)\n\n\n
a column past the head: k beside q | attention | attention/common.py
- in_rows[:, None] & (FIRST + tl.arange(0, SIZE) < END)[None, :]
+ in_rows[:, None] & (FIRST + tl.arange(0, SIZE) <= END)[None, :]
the last block of keys unmasked | attention | attention/forward_tiled.py
- acc, l, m, q_block, *heads, rope, bias, rows, whole, keys, n, scale, LAST_N, True
+ acc, l, m, q_block, *heads, rope, bias, rows, whole, keys, n, scale, LAST_N, False
lse of a query past N | attention backward, dk and dv | attention/backward_tiled.py
- delta_row + rows, mask=rows < N,
+ delta_row + rows, mask=rows <= N,
lse of a query past N, all in one program | attention backward | attention/backward_resident.py
- lse_row + rows, mask=rows < N,
+ lse_row + rows, mask=rows <= N,
a row of the workspace too many | sum of rows | rows.py
- P=P, MORE_P
+ P=P + 1, MORE_P
a sum past D | sum of rows | rows.py
- tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=offs_d < D
+ tl.sum(total, 0).to(out_ptr.dtype.element_ty), mask=offs_d <= D
a split too many | patch embedding backward | patch_embed/backward.py
- in range(splits)
+ in range(splits + 1)
rows before the first | patch embedding backward | patch_embed/backward.py
- if token >= prefix:
+ if token >= 0:
factors of the next image | add + layer_norm, factors | rows.py
- rows // rows_per_sample,
+ rows // rows_per_sample + 1,
a descriptor a row too long | linear, qkv | matmul/product.py
- TensorDescriptor(x, list(x.shape),
+ TensorDescriptor(x, [x.shape[0] + 1, x.shape[1]],
bias of a column past N | linear + gelu | matmul/product.py
- mask=offs_n < N, other
+ mask=offs_n <= N, other
v by the strides of k | attention, peaked, separate tensors | attention/forward_rows.py
- head_of(v, b, h, HEAD)
+ head_of((v[0], k[1]), b, h, HEAD)
a row past the tables | attention, rotary | attention/terms.py
- & (rows < N)\n    row_ptrs
+ & (rows <= N)\n    row_ptrs
prefix tokens turned | attention, rotary | attention/terms.py
- (rows >= rope[3]) &
+ (rows >= 0) &
the next head's bias | attention, bias | attention/terms.py
- h.to(tl.int64) * strides[1])
+ (h + 1).to(tl.int64) * strides[1])
a whole block without a mask | attention backward, packed | attention/terms.py
- return tl.maximum(count - 1, 0) // BLOCK * BLOCK
+ return tl.cdiv(count, BLOCK) * BLOCK
# write-write race
all splits into one slice | weight gradient, fc1 | matmul/weight_grad.py
- split.to(tl.int64) * stride_os
+ split.to(tl.int64) * 0
the sums of two heads in one slot | attention backward | attention/common.py
- * H + h) * HEAD.dim
+ * H + h // 2) * HEAD.dim
tiles of queries that overlap | attention backward, dq | attention/backward_tiled.py | silent
- index * BLOCK_M, n, scale)
+ index * (BLOCK_M - 1), n, scale)
prefix tokens a row too far | patch embedding | patch_embed/forward.py
- (first + token)[:, None] * D
+ (first + token + 1)[:, None] * D
rows shared by two programs | scaled rows | rows.py
- tl.num_programs(0) * BLOCK_M
+ tl.num_programs(0)
a row tile of sums for two | dgelu | matmul/mlp.py
- sums_ptr + index_m.to(tl.int64) * N
+ sums_ptr + (index_m // 2).to(tl.int64) * N
sums of two samples in one | attention backward | attention/backward_resident.py
- sums_ptr + (b.to(tl.int64)
+ sums_ptr + (b.to(tl.int64) // 2
dk of two heads in one | attention backward | attention/backward_resident.py
- dqkv_box.store([b, 1, h, start
+ dqkv_box.store([b, 1, h // 2, start
o of two heads in one | attention | attention/forward_rows.py
- o_box.store([b, h, start, 0]
+ o_box.store([b, h // 2, start, 0]
row tiles of one group | linear + gelu | matmul/product.py
- first = pid // (GROUP_M * blocks_n) * GROUP_M
+ first = 0
keys of the next sample | attention, packed | attention/common.py
- return first, end - first
+ return first, tl.minimum(end - first + 1, tokens - first)
patches without the prefix before them | patch embedding, packed | patch_embed/patches.py
- tl.load(packed[0] + row, mask=mask, other=0)
+ row
# missing barrier
rows one element short | layer_norm | rows.py
- ptr + rows.to(tl.int64) * D + offs_d
+ ptr + rows.to(tl.int64) * (D - 1) + offs_d
# two values
two rows in one | linear + gelu | matmul/mlp.py
- at = offs_m[:, None] * stride_om
+ at = offs_m[:, None] // 2 * stride_om
patches one pixel short | patch embedding backward | patch_embed/patches.py
- (x * AXES.k2)
+ (x * (AXES.k2 - 1))
# left unwritten
a grid one row tile short | linear + residual, fc2 | matmul/product.py
- programs = cdiv(m, blocks[0]) * cdiv(n, blocks[1])
+ programs = max(1, m // blocks[0]) * cdiv(n, blocks[1])
a split of the workspace for nobody | patch embedding backward | patch_embed/backward.py | silent
- torch.empty(splits, width
+ torch.empty(splits + 1, width
the sums of dk | attention backward | attention/backward_resident.py
-         tl.store(row + step, tl.zeros((D,), tl.float32), mask=inside)\n
+
the last mean | layer_norm | layer_norm/forward.py
- mean_ptr + rows, mean, mask=rows < M
+ mean_ptr + rows, mean, mask=rows < M - 1
the last lse | attention | attention/forward_rows.py
- lse_of(shift, l, scale, HEAD), mask=rows < N)
+ lse_of(shift, l, scale, HEAD), mask=rows < N - 1)
one tile of queries | attention | attention/forward_rows.py
- 0, query_blocks,
+ 0, 1,
always the first images | patch embedding | patch_embed/forward.py
- (block - blocks) // prefix * BLOCK_M
+ 0 * BLOCK_M
the sums of the gates in those of up | dgated | matmul/gated.py
- sum_ptrs[1] + index_m
+ sum_ptrs[0] + index_m
two samples in the same tiles | attention, packed | attention/common.py
- (others < sample))
+ (others > sample + 1))
the second tile of a sample for the first | attention, packed | attention/common.py
- tl.store(ptrs + 2, index, mask=mask)
+ tl.store(ptrs + 2, index + 1, mask=mask)
sums of a program that is left over | attention backward, packed | attention/backward_tiled.py
- store_sums(sums_ptr, zero_head_rows(16, QK), tile_index(b, index, N, H, BLOCK_M, PACKED), h, H, QK)
+ pass
# uninitialised read
delta of nobody | attention backward, dk and dv | attention/launchers.py
- grads=tuple(pairs[4:]), lse_ptr=lse, delta_ptr=delta
+ grads=tuple(pairs[4:]), lse_ptr=lse, delta_ptr=torch.empty_like(lse)
the last folded weight | patch embedding, uint8 | patch_embed/forward.py
- folded.to(folded_ptr.dtype.element_ty), mask=k < K
+ folded.to(folded_ptr.dtype.element_ty), mask=k < K - 1
# false hint
a hint of 16 for heads of 72 | attention | attention/launchers.py | silent
- 1 if misaligned % 8 else 8,
+ 1 if misaligned % 8 else 16,
a hint for the rows of odd tensors | attention | attention/launchers.py | silent
- 1 if misaligned % 8 else 8,
+ 8,
# atomic operation
an atomic sum | sum of rows | rows.py
- tl.store(sum_ptr + tl.program_id(0)
+ tl.atomic_add(sum_ptr + tl.program_id(0)
# wrong numbers
the sum of another workspace | column sums, gated MLP's block | rows.py
- more, out = ws_ptrs[FIRST + i]
+ more, out = ws_ptrs[len(ws_ptrs) - 1]
a residual read too early | linear + residual, fc2 | matmul/persistent.py
- if step == EARLY:
+ if step == EARLY - STEPS:
pairs the wrong way round | dgelu, from the slope | matmul/persistent.py
- return tl.join(low.to(dtype, bitcast=True), high.to(dtype, bitcast=True))
+ return tl.join(high.to(dtype, bitcast=True), low.to(dtype, bitcast=True))
always the first queries | attention | attention/forward_rows.py
- q_box.load([b, h, start, 0])
+ q_box.load([b, h, 0, 0])
lse in base 2 | attention | attention/common.py
- return tl.fma(shift, LN2, tl.log2(l) * LN2)
+ return tl.fma(shift, LN2, tl.log2(l))
zeros that nobody asked for | layer_norm | rows.py
- BLOCK_D), other=0.0)
+ BLOCK_D))
the last rows' dweight | layer_norm backward | layer_norm/backward.py
- dw = _add(dw_ptr, dw, dw_more, CHUNKS)
+ dw = dw_more
scales of another row | patch embedding, uint8, oblong, no prefix | patch_embed/forward.py
- tl.store(scale_ptr + d, bits
+ tl.store(scale_ptr + (d + 1) % tl.num_programs(0), bits
a row's largest number left out | patch embedding, uint8, oblong, no prefix | patch_embed/forward.py
- for start in range(0, K, BLOCK_K):\n            k
+ for start in range(K, K, BLOCK_K):\n            k
one slice of dweight | patch embedding backward | patch_embed/backward.py
-         partial_ptrs += D * K\n
+
channels of another order | patch embedding, uint8, oblong, no prefix | patch_embed/patches.py
- C_INNER=1 if channels_last(images)
+ C_INNER=2 if channels_last(images)
dQ of the last block of keys alone | attention backward | attention/backward_resident.py
- tl.dot(ds, k, dqs[i])
+ tl.dot(ds, k)
dk without its scale | attention backward | attention/backward_resident.py
- (dk * scale).to(DTYPE)
+ dk.to(DTYPE)
a key past N in the sums of dv | attention backward | attention/backward_resident.py
- tl.arange(0, BLOCK_N) < N)[None, :]
+ tl.arange(0, BLOCK_N) <= N)[None, :]
the sums of the last block of dv | attention backward | attention/backward_resident.py
- dv_sums += tl.sum(dv, 1)
+ dv_sums = tl.sum(dv, 1)
q for k in the box | attention backward | attention/backward_resident.py
- qkv_box.load([b, H + h, start, 0])
+ qkv_box.load([b, h, start, 0])
a misaligned descriptor | linear + gelu | matmul/product.py
-  and x.data_ptr() % 16 == 0 and
+  and
gradients turned on | attention backward, rotary | attention/terms.py
- a * cos_a + b * sin_b, b * cos_b - a * sin_a, rows
+ a * cos_a - b * sin_b, b * cos_b + a * sin_a, rows
a bias of one sample | attention backward, of a bias | attention/terms.py
- in tl.range(0, samples,
+ in tl.range(0, 1,
keys that do not count | attention, key lengths | attention/forward_tiled.py
- (cols < keys)[None, :], s,
+ (cols < N)[None, :], s,
a sample that begins with the batch | attention, packed | attention/forward_tiled.py
- heads = head_of(k, b, h, HEAD, first, PACKED)
+ heads = head_of(k, b, h, HEAD, first * 0, PACKED)
tables of the first sample | attention, packed, rotary | attention/terms.py
- first.to(tl.int64) * strides[2]
+ first.to(tl.int64) * 0
# read-write race
dQ over K | attention backward, dq | attention/launchers.py
- o, do, dq, options
+ o, do, k, options
o over V | attention | attention/launchers.py
- _arguments(scale, q, k, v, o, options
+ _arguments(scale, q, k, v, v, options
"""


MUTANTS = [
    Mutant(what, file, old, new, name, kind, bool(silent))
    for kind, (what, name, file, *silent), old, new in listed(BUGS)
]
